"""Classify texts, or pairs of texts: made sentences, acceptable or not; the tasks of GLUE.

python tasks/text_cls.py                    configs/made_sentences.yaml: train, test
python tasks/text_cls.py fit  --config configs/glue/cola.yaml
python tasks/text_cls.py test --config ... --ckpt_path runs/glue/cola/checkpoints/last.ckpt
python tasks/text_cls.py table configs/glue/*.yaml --seeds 0 1 2
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("text_cls"))
