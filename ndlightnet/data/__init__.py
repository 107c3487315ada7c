"""From a file on disk to a batch: videos, volumes and the small sets made on this machine."""
