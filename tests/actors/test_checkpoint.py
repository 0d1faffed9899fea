import pytest
import torch

from kondo.actors import checkpoint
from kondo.run_files import DamagedFileError

STATE = {"step": 7, "policy": {"weight": torch.arange(5.0)}, "price": [1.5, 1.0]}


def same(state):
    return (
        torch.equal(state["policy"]["weight"], STATE["policy"]["weight"])
        and (state["step"], state["price"]) == (7, [1.5, 1.0])
        and state["format"] == checkpoint.FORMAT
    )


def test_a_checkpoint_comes_back(tmp_path):
    checkpoint.save(tmp_path, STATE)
    assert same(checkpoint.load(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.FILE]


def test_no_flipped_bit_is_loaded(tmp_path):
    """A flip in the padding between values changes nothing; every other one is refused."""
    checkpoint.save(tmp_path, STATE)
    path = tmp_path / checkpoint.FILE
    whole, refused = path.read_bytes(), 0
    for place in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[place] ^= 4
        path.write_bytes(flipped)
        try:
            assert same(checkpoint.load(tmp_path)), place
        except DamagedFileError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_cut_checkpoint_is_set_aside_and_the_message_says_what_to_do(keep, tmp_path):
    checkpoint.save(tmp_path, STATE)
    path = tmp_path / checkpoint.FILE
    path.write_bytes(cut := path.read_bytes()[:keep])
    with pytest.raises(DamagedFileError) as caught:
        checkpoint.load(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{path} is damaged (")
    assert "set aside as checkpoint.pt.damaged; put a good copy" in message
    assert "\n" not in message
    assert not path.exists()
    assert path.with_name("checkpoint.pt.damaged").read_bytes() == cut


def test_a_second_damaged_checkpoint_does_not_replace_the_first(tmp_path):
    for text in ("first", "second"):
        (tmp_path / checkpoint.FILE).write_text(text)
        with pytest.raises(DamagedFileError):
            checkpoint.load(tmp_path)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"checkpoint.pt.damaged": "first", "checkpoint.pt.damaged-2": "second"}


def test_checksums_are_written_whatever_torch_is_told(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        checkpoint.save(tmp_path, STATE)
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(checkpoint.load(tmp_path))


def test_a_checkpoint_of_another_version_is_refused_and_left_in_place(tmp_path):
    checkpoint.save(tmp_path, STATE | {"format": 3})
    with pytest.raises(ValueError, match="must have format 4, got 3"):
        checkpoint.load(tmp_path)
    assert (tmp_path / checkpoint.FILE).exists()
