"""Populations: many members trained in one batched program.

- member.py: what a member is, a seed, a learning rate, an update rule and its frictions
- networks.py: P networks as stacked parameters, MLPs
- transformer.py: transformers
- fused_layers.py, layer_kernels.py: their layers by Triton kernels, for a GPU
- losses.py: losses of whole answers, of a whole batch and of labels
- programs.py: what one step of a task does: draw, act, pay; then the loss of kept rows
- draft_screens.py: draft screens, stale, quantised or narrower stand-ins for the policy
- frictions.py: actors that are stale, buggy or lucky, and rewards that are wrong
- cuda_graphs.py: CUDA graphs, the same program without the cost of launching it
- train.py: one step of all members: rules, groups, compaction, Adam
- run.py: many steps of several populations side by side, records, checkpoints
"""
