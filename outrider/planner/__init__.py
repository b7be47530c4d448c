"""What a pair of models would do as draft and target, known before they are deployed.

values.py    what is asked and what is measured, and their JSON; torch-free
measure.py   the process that measures: the target's texts, the draft over them, costs
compare.py   two models' logits over the same tokens: overlap, divergence, agreement, ranks
costs.py     what passes and proposals cost, as fitted lines
predict.py   acceptance, best length, speed-up and draft workers from what was measured; torch-free
report.py    all of it as one JSON object, tables and words
plot.py      the same, drawn
"""
