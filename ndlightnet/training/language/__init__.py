"""Language models of bytes."""

COMMANDS = {
    "text_lm": {
        "line": "a language model of bytes",
        "task": "language.text_task:TextTask",
        "data": "language.text_data:TextData",
        "config": "enwik8",
        "commands": {"curves": "language.curves:curves", "generate": "language.generate_command:generate"},
    }
}
