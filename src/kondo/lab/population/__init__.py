"""Populations: many members trained in one batched program.

member.py     what a member is: a seed, a learning rate and an update rule
networks.py   P networks as stacked parameters
choice.py     priorities and gates over [P, N] units, no host in the loop
programs.py   what one step of a task does: draw, act, pay; then the loss of kept rows
graphs.py     CUDA graphs: the same program without the cost of launching it
train.py      the loop: groups of members, compaction, Adam, records, checkpoints
"""
