"""What one rollout costs on its way: seconds and bytes, as `measure` finds them.

    actor     load (new weights) + rollout + pack + pack_row * sent + gap + gap_byte * bytes
    way       hop to the driver; header_bytes + row_bytes * sent over the network
    driver    wait + wait_reference * references, once a turn; handle for each thing that arrived
    learner   learner_step + publish + message * messages + sent_row * sent + kept_row * kept + gap

`sent` counts the rows of a message, `kept` those among them that are trained on.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Medians. Seconds of one core unless said otherwise."""

    samples: int
    """Rows of a rollout."""

    rollout: float
    load: float
    """Newly published weights out of the machine's object store into the policy."""
    pack: float
    """Delight, gate and sketch of a rollout, whatever is sent."""
    pack_row: float
    """To gather and measure one row that is sent."""
    actor_gap: float
    """Ray's, between two rollouts of an actor: the message goes to the object store."""
    actor_gap_byte: float
    """Of it, per byte of the message."""
    actor_hop: float
    """Latency, no work: order to actor, and receipt to driver."""

    system: float
    """Ray's own processes and threads, per rollout; no stage waits for it, but it needs a core."""
    wait: float
    """A turn of the driver: to ask Ray what has arrived."""
    wait_reference: float
    """Of it, per reference asked for."""
    handle: float
    """To take one thing that arrived and give the order that follows from it."""

    learner_step: float
    """A step without its messages: Adam, the price, the ledger."""
    publish: float
    """To copy the weights out."""
    message: float
    """To fetch and check one message, whatever it holds."""
    sent_row: float
    """To check one row, and to pass it over or to gather it."""
    kept_row: float
    """To train on one row."""
    learner_gap: float
    """Ray's, between two steps: report and weights go to the object store."""
    learner_hop: float
    """Latency, no work: step order to learner, and report to driver."""
    checkpoint: float
    """To write one, the wait for the disk included."""

    header_bytes: float
    """Of a message, the sketch included."""
    row_bytes: float
    weights_bytes: float

    actor_spread: float
    """Standard deviation of the logarithm of an actor's seconds."""
    learner_spread: float
    """The same of the learner's."""

    def actor_seconds(self, sent: float, *, new_weights: bool) -> float:
        """Return what an actor works on a rollout of which `sent` rows are sent."""
        packing = self.pack + self.pack_row * sent
        gap = self.actor_gap + self.actor_gap_byte * self.message_bytes(sent)
        return self.load * new_weights + self.rollout + packing + gap

    def message_bytes(self, sent: float) -> float:
        """Return the size of a message with that many rows."""
        return self.header_bytes + self.row_bytes * sent

    def step_seconds(self, messages: int, sent: float, kept: float) -> float:
        """Return what the learner works on a step; `sent` and `kept` are rows of each message."""
        rows = self.sent_row * sent + self.kept_row * kept
        return self.learner_step + messages * (self.message + rows)


def left(total: float, *known: float) -> float:
    """Return what is left of a time; 0 where a busy machine leaves less than nothing.

    Example:
        >>> from kondo_lab.studies.scale.costs import left
        >>> left(4.0, 1.0, 1.0), left(1.0, 1.5)
        (2.0, 0.0)
    """
    return max(0.0, total - sum(known))
