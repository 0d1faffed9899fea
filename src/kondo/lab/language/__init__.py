"""Small language models, trained by reinforcement on text tasks, many at once or one alone.

- model.py: P transformers as stacked parameters; one of them as a module for `kondo.lm`
- sampler.py: completions with the log-probs they were drawn with, keys and values cached
- warm.py: a supervised start on demonstrations, and Adam for P members
- contenders.py: what is kept of a batch, and the loss of it
- population.py: reinforcement of P members in one program, records, checkpoints
- loop.py: one model end to end through `kondo.lm.backward`, timed
"""
