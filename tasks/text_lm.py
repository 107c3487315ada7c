"""Train a language model of bytes or of any vocabulary on short windows of a text, and test it on longer windows.

python tasks/text_lm.py                     configs/enwik8.yaml, for a GPU: train, test
python tasks/text_lm.py tokenize FILES... --out FOLDER --tokenizer gpt2_bpe     or --train 32000
python tasks/text_lm.py fit  --config configs/enwik8.yaml --model.net.init_args.depth 12
python tasks/text_lm.py test --config ... --ckpt_path runs/enwik8/checkpoints/last.ckpt
python tasks/text_lm.py evaluate RUN TASKS...               zero-shot tasks, .jsonl
python tasks/text_lm.py generate --ckpt_path RUN --prompt "The city"
python tasks/text_lm.py curves RUN ... --out curves.png    folders of tested runs, one picture
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("text_lm"))
