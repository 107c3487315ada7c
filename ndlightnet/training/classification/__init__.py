"""Naming the class of an image, a video, a volume or a signal."""
