"""Tasks: what is drawn and what is paid. The rules work on a whole population at once.

`base` says what a sequence task is. `digits.DigitsBandit` and `reversal.Reversal` wrap two of the
rules for one policy with a generator of its own. Only MNIST may need a download.
"""
