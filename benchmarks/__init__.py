"""Benchmarks, one question per script: run each as `python -m benchmarks.NAME`.

- `kernels.attention`: attention kernels, in parts, against cuDNN.
- `peers`: attention kernels of several projects on the same lists, with errors and memory.
- `kernels.selection`: cost of selecting an index.
- `kernels.tune`: configurations of the kernels.
- `ring.attention`, `ring.model`: ring attention, measured and modeled for several hosts.
- `step.patterns`, `step.trace_summary`: time of a training step.
- `step.replicas`: balance of data-parallel replicas, modeled and measured.
- `quality.frontier`: loss against density on a pretrained model; `quality.texts` makes its texts.
- `quality.evaluate`: time of a prompt and of each generated token.
- `soak`: a run that is killed again and again, against an uninterrupted one.

`results` holds the tables, named by subject, device and date.
"""
