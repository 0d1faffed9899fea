"""Small language models, trained by reinforcement on text tasks, many at once or one alone.

- transformer.py: P transformers as stacked parameters; one of them as a module for `kondo.lm`
- sampler.py: completions with the log-probs they were drawn with, keys and values cached
- supervised.py: a supervised start on demonstrations, and Adam for P members
- contenders.py: what is kept of a batch, and the loss of it
- population.py: reinforcement of P members in one program
- drafts.py: draft screens of one model, and how far they choose as the exact one does
- timed_step.py: one update of one model, through `kondo.backward` and without it, timed
- loop.py: one model end to end: sample, pay, learn, step
- step_seconds.py: how long a step takes, and what the saved time buys
"""
