"""Speak texts: made words, LJ Speech or your own recordings with their texts.

python tasks/tts.py                    configs/made_babble.yaml: train, test
python tasks/tts.py fit     --config configs/ljspeech.yaml
python tasks/tts.py test    --config ... --ckpt_path runs/ljspeech/checkpoints/last.ckpt
python tasks/tts.py predict --config ... --ckpt_path ... --data.input texts/
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("tts"))
