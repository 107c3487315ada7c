"""Language models, masked models, classification of texts, summaries."""

COMMANDS = {
    "text_lm": {
        "line": "a language model of bytes or of any vocabulary",
        "task": "language.text_task:TextTask",
        "data": "language.text_data:TextData",
        "config": "enwik8",
        "commands": {
            "tokenize": "language.tokenize_command:tokenize_files",
            "evaluate": "language.evaluate_command:evaluate",
            "curves": "language.curves:curves",
            "generate": "language.generate_command:generate",
        },
    },
    "text_mlm": {
        "line": "a masked language model, for fine-tuning",
        "task": "language.text_mlm_task:MaskedTextTask",
        "data": "language.masked_data:MaskedTextData",
        "config": "cramming",
        "trainings": ("fit", "validate", "test"),
    },
    "text_cls": {
        "line": "classify texts, or pairs of texts",
        "task": "language.text_cls_task:TextClsTask",
        "data": "language.sentence_data:SentenceData",
        "config": "made_sentences",
        "commands": {"table": "language.table_command:table"},
    },
    "summarize": {
        "line": "summaries of texts, or any text from another",
        "task": "language.summary_task:SummaryTask",
        "data": "language.summary_data:SummaryData",
        "config": "made_notes",
    },
}
