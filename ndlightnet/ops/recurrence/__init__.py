"""Linear recurrences along tokens, m_t = f_t . m_(t-1) + b_t, and their forms in mixers.

scan.py         the one prefix scan, over pairs (f, b), with its gradient
chunks.py       chunks of tokens, pieces of chunks, and scores with a decay between two tokens, by halving
exponential.py  convolution with constant decays, in chunks: S4, MD-TPE
gated.py        decays of rows: linear attention, GLA, HGRN2, TNL, and LightNet's causal form
delta.py        the delta rules; selective.py: Mamba; ssm.py: S4, S5; wkv.py: RWKV-4
memory.py       the general form of all of them, and their specification token by token
"""
