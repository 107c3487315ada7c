"""Train a masked language model, which reads in both directions, for fine-tuning.

python tasks/text_mlm.py                     configs/cramming.yaml, for a GPU: train, test
python tasks/text_mlm.py fit  --config configs/cramming.yaml --model.minutes 30
python tasks/text_mlm.py test --config ... --ckpt_path runs/cramming/checkpoints/last.ckpt
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("text_mlm"))
