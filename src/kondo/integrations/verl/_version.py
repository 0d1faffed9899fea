"""The versions of verl whose private seams `trainer.py` and `worker.py` rely on."""

from kondo.integrations.framework import Framework

VERL = Framework(package="verl", lowest=(0, 9, 1), below=(0, 10), tested="0.9.1")

# Method -> its first parameters. tests/integrations/verl/test_contract.py holds more.
TRAINER_SEAMS = {
    "_init_resource_pool_mgr": ("self",),
    "_init_tokenizer": ("self",),
    "_load_checkpoint": ("self",),
    "_save_checkpoint": ("self",),
    "_update_actor": ("self", "batch", "metrics"),
}
WORKER_SEAMS = {
    "set_loss_fn": ("self", "loss_fn"),
    "train_batch": ("self", "data"),
    "train_mini_batch": ("self", "data"),
}
ENGINE_SEAMS = {
    "eval_mode": ("self", "kwargs"),
    "forward_step": ("self", "micro_batch", "loss_function", "forward_only"),
    "train_mode": ("self", "kwargs"),
}
