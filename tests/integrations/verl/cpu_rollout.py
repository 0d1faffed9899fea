"""A rollout engine for tests that speaks verl's interface: transformers instead of vLLM.

LLMServerManager (verl) -> HFReplica -> HFServer, a Ray actor with a model and `generate`
the actor's worker (verl) -> HFRollout.update_weights -> the same HFServer
"""

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from integrations.verl.fit_inputs import NAME


def server_name(rank):
    return f"{NAME}_server_{rank}"


@ray.remote(num_cpus=0)
class HFServer:
    """One copy of the policy, which samples token by token."""

    def __init__(self, path, length):
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.length, self.version = length, 0
        self.draws = torch.Generator().manual_seed(0)

    def load_weights(self, weights, version):
        self.model.load_state_dict(weights, strict=False)
        self.version = version

    @torch.no_grad()
    def generate(self, request_id, prompt_ids, sampling_params, **kwargs):
        ids, log_probs, stop = list(prompt_ids), [], self.model.config.eos_token_id
        for _ in range(self.length):
            logits = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(logits.exp(), 1, generator=self.draws))
            log_probs.append(float(logits[token]))
            ids.append(token)
            if token == stop:
                break
        return TokenOutput(
            token_ids=ids[len(prompt_ids) :],
            log_probs=log_probs,
            stop_reason="completed",
            extra_fields={"global_steps": self.version or 0},
        )

    def wake_up(self):
        return

    def sleep(self):
        return


class HFReplica(RolloutReplica):
    async def launch_servers(self):
        name = server_name(self.replica_rank)
        made = HFServer.options(name=name).remote(
            self.model_config.path, self.config.response_length
        )
        self.servers, self._server_handle, self._server_address = [made], made, name


class HFRollout(BaseRollout):
    async def resume(self, tags):
        return

    async def release(self):
        return

    async def update_weights(self, weights, global_steps=None, **kwargs):
        rank = torch.distributed.get_rank()
        found = {name: weight.detach().cpu().clone() for name, weight in weights}
        server = ray.get_actor(server_name(rank))
        await server.load_weights.remote(found, global_steps)
