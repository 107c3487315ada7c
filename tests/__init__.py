"""Tests; a package, so that no other installed package of this name stands in its place."""
