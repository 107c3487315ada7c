"""Summarize texts, or write any text of another: made notes, of which one sentence is news; SciTLDR, AESLC.

python tasks/summarize.py                    configs/made_notes.yaml: train, test
python tasks/summarize.py fit     --config configs/scitldr.yaml
python tasks/summarize.py test    --config ... --ckpt_path runs/scitldr/checkpoints/last.ckpt
python tasks/summarize.py predict --config ... --ckpt_path ... --data.input texts/
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("summarize"))
