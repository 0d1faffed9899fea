"""What a whole run of verl needs: prompts, a reward, and options for a tiny one on the CPU."""

import pathlib

NAME = "transformers_cpu"  # the rollout engine of `cpu_rollout`


def write_prompts(path, number=16):
    import pandas as pd

    rows = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": f"{i} plus {7 * i}"}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": str(8 * i)},
            "extra_info": {"index": i},
        }
        for i in range(number)
    ]
    pd.DataFrame(rows).to_parquet(path)
    return str(path)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Return the share of digits: it varies between the responses to one prompt."""
    return sum(letter.isdigit() for letter in solution_str) / max(len(solution_str), 1)


def overrides(model, prompts, folder, *, ranks=2):
    """Return the command line of `python -m verl.trainer.main_ppo`, without the trainer's mode."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        "data.dataloader_num_workers=0",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.ppo_mini_batch_size=2",
        f"{actor}.ppo_micro_batch_size_per_gpu=2",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.optim.lr=0.001",
        f"{actor}.ppo_epochs=1",
        f"{rollout}.name={NAME}",
        f"{rollout}.n=4",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=2",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.n_gpus_per_node={ranks}",
        f"reward.custom_reward_function.path={pathlib.Path(__file__)}",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.nnodes=1",
        "trainer.device=cpu",
        'trainer.logger=["console","file"]',
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}/checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=32",  # as Ray counts them: what is started must fit
        f"+ray_kwargs.ray_init.num_gpus={ranks}",
        "+ray_kwargs.ray_init.include_dashboard=False",
        f"hydra.run.dir={folder}/hydra",
    ]
