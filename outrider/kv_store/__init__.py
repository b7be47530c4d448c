"""KV blocks in Redis: full blocks of committed tokens, written behind, brought back by another
worker where that beats computing them again (docs/design.md §6). A cache like all KV: whatever is
missing, late, damaged or foreign is computed instead. Torch-free.
"""
