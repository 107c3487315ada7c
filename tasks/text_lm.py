"""Train a language model of bytes on short windows of a text, and test it on longer windows.

python tasks/text_lm.py                     configs/enwik8.yaml, for a GPU: train, test
python tasks/text_lm.py fit  --config configs/enwik8.yaml --model.net.init_args.depth 12
python tasks/text_lm.py test --config ... --ckpt_path runs/enwik8/checkpoints/last.ckpt \
    --model.decode_bytes 131072             also byte by byte, in constant memory
python tasks/text_lm.py curves RUN ... --out curves.png    folders of tested runs, one picture
"""

import sys

from ndlightnet.__main__ import door

if __name__ == "__main__":
    sys.exit(door("text_lm"))
