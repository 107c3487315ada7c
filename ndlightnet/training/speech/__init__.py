"""Speech of texts."""

COMMANDS = {
    "tts": {
        "line": "speak texts",
        "task": "speech.tts_task:TTSTask",
        "data": "speech.speech_data:SpeechData",
        "config": "made_babble",
    }
}
