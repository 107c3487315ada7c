"""LightNet: additive-decay attention for grids of any number of axes."""
