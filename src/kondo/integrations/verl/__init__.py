"""A plugin for verl: actor updates that pay only for the rows that are worth it.

    trainer.v1.trainer_mode=kondo +trainer.v1.kondo.gate=unbiased:0.1

    generate, score, advantages (verl) -> select -> plan -> verl's own update, on the kept rows

`plugin` is verl's entry point. `trainer` and `worker` subclass verl's classes and import verl; the
other modules hold the arithmetic and do not. What follows what, and which options do not fit, is in
docs/integrations/verl.md.
"""
