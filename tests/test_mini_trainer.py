"""The miniature trainer does what its tests and the demo take for granted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mini
import pytest
import torch
from mini_moss_tts.mini_trainer.options import resolve_channel_weights
from mini_moss_tts.mini_trainer.prompts import ChatPrompts, DelayedPrompts, FramePrompts
from mini_moss_tts.mini_trainer.records import ChatDataset, SpeechDataset, load_jsonl_for_rank, shard_paths_for_rank
from mini_moss_tts.moss_tts_local.configuration_moss_tts import MossTTSDelayConfig
from mini_moss_tts.moss_tts_local.modeling_moss_tts import MossTTSDelayModel
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

UNREAD = "model.language_model.embed_tokens.weight"
STEP_LINE = re.compile(
    r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] epoch=0 step=[123]/3 loss=\d+\.\d{4} lr=\d\.\d\de[+-]\d\d "
    r"step_time=\d+\.\d\ds steps_per_sec=\d+\.\d{3} samples_per_sec=\d+\.\d\d eta=\d+:\d\d:\d\d$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mini.make_mini_inputs(tmp_path_factory.mktemp("mini") / "inputs")


@pytest.fixture(scope="module")
def direct(inputs: Path) -> mini.MiniRun:
    """``python sft.py``: 12 records, batches of 2, accumulation over 2."""
    return mini.run_mini(inputs, inputs.parent / "direct")


@pytest.fixture(scope="module")
def dataset(inputs: Path) -> SpeechDataset:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(inputs)
    processor = FramePrompts(tokenizer, None, MossTTSDelayConfig.from_pretrained(inputs))
    _, records, _, _ = load_jsonl_for_rank(str(inputs / "train.jsonl"), 1, 0)
    return SpeechDataset(records, processor)


@pytest.fixture
def model(inputs: Path) -> MossTTSDelayModel:
    return MossTTSDelayModel.from_pretrained(inputs).train()


def test_the_same_arguments_make_the_same_bytes(inputs: Path, tmp_path: Path) -> None:
    again = mini.make_mini_inputs(tmp_path / "again")
    other = mini.make_mini_inputs(tmp_path / "other", seed=1)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "train.jsonl"):
        assert (again / name).read_bytes() == (inputs / name).read_bytes()
    for name in ("model.safetensors", "train.jsonl"):
        assert (other / name).read_bytes() != (inputs / name).read_bytes()


def test_steps_are_printed_in_upstreams_form(direct: mini.MiniRun) -> None:
    assert len(STEP_LINE.findall(direct.output)) == 3, direct.output
    assert [step.number for step in direct.steps] == [1, 2, 3]
    assert direct.steps[-1].rate == 0.0  # linear schedule, sized for these three steps


def test_training_moves_every_weight_but_the_unread_table(inputs: Path, direct: mini.MiniRun) -> None:
    before, after = load_file(inputs / "model.safetensors"), direct.weights()
    assert before.keys() == after.keys()
    unmoved = {name for name in before if torch.equal(before[name], after[name])}
    assert unmoved == {UNREAD}


def test_checkpoint_holds_what_upstreams_does(inputs: Path, direct: mini.MiniRun) -> None:
    checkpoint = direct.checkpoint()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json"):
        assert (checkpoint / name).exists()
    for source in (mini.MINI / "moss_tts_local").glob("*.py"):
        assert (checkpoint / source.name).read_bytes() == source.read_bytes()
    saved = json.loads((checkpoint / "finetune_args.json").read_text())
    assert saved["model_path"] == str(inputs)
    assert saved["global_batch_size"] == 4
    assert saved["resolved_channelwise_loss_weight"] == [1.0, 8.0, 8.0, 8.0, 8.0]


def test_checkpoint_loads_through_its_own_code(direct: mini.MiniRun, tmp_path: Path) -> None:
    script = (
        "import sys, torch\n"
        "from safetensors.torch import save_model\n"
        "from transformers import AutoModel\n"
        "model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "assert type(model).__module__.startswith('transformers_modules.'), type(model)\n"
        "save_model(model, sys.argv[2])\n"
    )
    reloaded = tmp_path / "reloaded.safetensors"
    environment = mini.clean_environment(HF_MODULES_CACHE=str(tmp_path / "modules"))
    command = [sys.executable, "-c", script, str(direct.checkpoint()), str(reloaded)]
    subprocess.run(command, env=environment, check=True, cwd=tmp_path)
    expected, found = direct.weights(), load_file(reloaded)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    ("variables", "folder", "expected"),
    [
        ({"MODEL_PATH": "x"}, mini.MINI, "SKIP_PREPARE=0"),
        ({"SKIP_PREPARE": "1"}, mini.MINI, "MODEL_PATH is not set"),
        ({"SKIP_PREPARE": "1", "MODEL_PATH": "x"}, mini.MINI.parent, "run this script in the miniature's folder"),
    ],
)
def test_launcher_says_what_is_missing(variables: dict[str, str], folder: Path, expected: str) -> None:
    script = mini.MINI / "moss_tts_local" / "finetuning" / "run_train.sh"
    environment = mini.clean_environment()
    environment.pop("MODEL_PATH", None)
    done = subprocess.run(
        ["bash", str(script)], env=environment | variables, cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_bad_arguments_stop_before_the_model_is_read(inputs: Path, tmp_path: Path) -> None:
    done = mini.run_mini(inputs, tmp_path / "none", "--warmup-ratio", "-0.5", check=False)
    assert done.status != 0
    assert "--warmup-ratio -0.5: expected a value 0 or more" in done.output
    assert not done.folder.exists()


def test_labels_are_the_answer_shifted_by_one(dataset: SpeechDataset) -> None:
    config = dataset.processor.model_config
    record = dataset.records[0]
    codes = torch.tensor(record["audio_codes"])
    batch = dataset.collate_fn([dataset[0]])
    labels, frames = batch["labels"][0], len(codes)
    answer = labels[-frames - 2 :]  # the frames, the token that ends the audio, the one that ends the turn
    assert torch.equal(answer[:frames, 1:], codes)
    slot, audio_end, turn_end = (
        config.audio_assistant_gen_slot_token_id,
        config.audio_end_token_id,
        config.im_end_token_id,
    )
    assert answer[:, 0].tolist() == [slot] * frames + [audio_end, turn_end]
    assert (answer[frames:, 1:] == -100).all()
    assert (labels[: -frames - 2] == -100).all()
    # Position t predicts row t + 1: labels and inputs overlap by one row less than their length.
    assert torch.equal(
        batch["input_ids"][0, -frames - 1 :], torch.where(answer == -100, config.audio_pad_code, answer)[:-1]
    )


def test_a_reference_voice_stands_in_the_prompt(dataset: SpeechDataset) -> None:
    record, config = dataset.records[0], dataset.processor.model_config
    rows, prompt_rows = dataset.processor.pack(record)
    voice = rows[rows[:, 0] == config.audio_user_slot_token_id]
    assert voice[:, 1:].tolist() == record["ref_audio_codes"]
    assert rows[prompt_rows - 1, 0] == config.audio_start_token_id
    without = {key: value for key, value in record.items() if key != "ref_audio_codes"}
    assert len(dataset.processor.pack(without)[0]) == len(rows) - len(voice) - 2
    listed = {**without, "reference_audio_codes": [record["ref_audio_codes"], None]}
    assert torch.equal(dataset.processor.pack(listed)[0], rows)


def test_batches_are_padded_on_the_left(dataset: SpeechDataset) -> None:
    config = dataset.processor.model_config
    batch = dataset.collate_fn([dataset[index] for index in range(4)])
    lengths = [len(dataset[index]["input_ids"]) - 1 for index in range(4)]
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert (batch["attention_mask"].int().diff(dim=1) >= 0).all()
    padding = ~batch["attention_mask"]
    assert (batch["input_ids"][padding][:, 0] == config.pad_token_id).all()
    assert (batch["input_ids"][padding][:, 1:] == config.audio_pad_code).all()
    assert (batch["labels"][padding] == -100).all()
    assert batch["input_ids"].shape == batch["labels"].shape == (4, max(lengths), 1 + config.n_vq)


def test_delayed_codebooks_start_one_row_later_each(dataset: SpeechDataset) -> None:
    config, record = dataset.processor.model_config, dataset.records[1]
    rows, prompt_rows = DelayedPrompts(dataset.processor.tokenizer, None, config).pack(record)
    answer, frames, late = rows[prompt_rows:], len(record["audio_codes"]), config.n_vq - 1
    for codebook in range(config.n_vq):
        column = answer[:, 1 + codebook]
        assert column[codebook : codebook + frames].tolist() == [row[codebook] for row in record["audio_codes"]]
        assert (column != config.audio_pad_code).sum() == frames
    slots = [config.audio_assistant_gen_slot_token_id] * frames + [config.audio_assistant_delay_slot_token_id] * late
    assert answer[:, 0].tolist() == [*slots, config.audio_end_token_id, config.im_end_token_id]


@pytest.fixture
def chat(inputs: Path) -> tuple[ChatDataset, dict[str, Any]]:
    """A question, an answer of three frames, and a question that nobody answers; four codebooks of 32 codes."""
    config = SimpleNamespace(rvq=4, audio_pad_token=32, reference_audio_pad=300, text_pad=301)
    frames = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    turns = [{"role": role, "text": "Why?", "audio_codes": frames} for role in ("user", "assistant", "user")]
    processor = ChatPrompts(PreTrainedTokenizerFast.from_pretrained(inputs), config)
    return ChatDataset(
        [{"conversations": turns}, {"conversations": turns[1:2], "ref_audio_codes": frames}], processor
    ), {"frames": frames}


def test_only_answers_of_a_conversation_are_learned(chat: tuple[ChatDataset, dict[str, Any]]) -> None:
    dataset, expected = chat
    item = dataset[0]
    rows, labels = item["input_ids"], item["labels"]
    learned = (labels != -100).any(dim=1)
    assert labels[learned][:3, 1:].tolist() == expected["frames"]
    assert labels[learned][3:].tolist() == [[-100, 34, -100, -100, -100]]  # the end, on one codebook
    assert torch.equal(rows[learned][:, 1:], torch.where(labels[learned] == -100, 32, labels[learned])[:, 1:])
    assert (rows[:, 1] == 33).sum() == 2  # two turns that open an audio: the last question is left out
    assert (labels[:, 0] == -100).all()


def test_conversations_are_padded_on_the_right(chat: tuple[ChatDataset, dict[str, Any]]) -> None:
    dataset, expected = chat
    batch = dataset.collate_fn([dataset[0], dataset[1]])
    lengths = [len(dataset[index]["input_ids"]) for index in range(2)]
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert (batch["attention_mask"].int().diff(dim=1) <= 0).all()
    padding = ~batch["attention_mask"]
    assert padding.any()
    assert (batch["labels"][padding] == -100).all()
    assert (batch["input_ids"][padding][:, 1:] == 32).all()
    voice = batch["input_ids"][1][batch["input_ids"][1, :, 0] == 300]
    assert voice[:, 1:].tolist() == expected["frames"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "no turns"}, "record without conversations"),
        ({"conversations": [{"role": "assistant", "text": "a"}]}, "a turn without audio_codes"),
    ],
)
def test_conversations_that_cannot_be_packed_are_refused(
    chat: tuple[ChatDataset, dict[str, Any]], record: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        chat[0].processor.pack(record)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"audio_codes": None}, "record without audio_codes"),
        ({"audio_codes": [[1, 2, 3]]}, "shape \\[1, 3\\]; expected \\[frames, 4\\]"),
        ({"ref_audio_codes": None, "ref_audio": "voice.wav"}, "ref_audio but no codes"),
    ],
)
def test_records_that_cannot_be_packed_are_refused(
    dataset: SpeechDataset, change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        dataset.processor.pack({**dataset.records[0], **change})


def test_files_are_found_and_shards_assigned(tmp_path: Path) -> None:
    shards = [tmp_path / f"train.rank0000{rank}-of-00002.jsonl" for rank in range(2)]
    for rank, path in enumerate(shards):
        path.write_text(json.dumps({"rank": rank, "text": "a\u2028b"}, ensure_ascii=False) + "\n\n", encoding="utf-8")
    _, records, own, sharded = load_jsonl_for_rank(str(tmp_path), 2, 1)
    assert (own, sharded, [record["rank"] for record in records]) == ([shards[1]], True, [1])
    _, records, own, sharded = load_jsonl_for_rank(f"{shards[0]}, {tmp_path}/*.jsonl", 1, 0)
    assert (own, sharded, [record["rank"] for record in records]) == (shards, False, [0, 1])
    assert shard_paths_for_rank([*shards, tmp_path / "other.jsonl"], 2, 0)[1] is False
    with pytest.raises(ValueError, match=r"no file matches .*missing\.jsonl"):
        load_jsonl_for_rank(f"{shards[0]},{tmp_path}/missing.jsonl", 1, 0)
    with pytest.raises(ValueError, match="for rank 1 of 2"):
        shard_paths_for_rank(shards[:1], 2, 1)


def test_channel_weights_are_spread_over_the_codebooks() -> None:
    assert resolve_channel_weights("1,32", 5) == [1.0, 8.0, 8.0, 8.0, 8.0]
    assert resolve_channel_weights("1,2,3", 3) == [1.0, 2.0, 3.0]
    assert resolve_channel_weights("", 3) is None
    with pytest.raises(ValueError, match="expected 2 or 5 values"):
        resolve_channel_weights("1,2,3", 5)


def test_a_channel_without_labels_gives_nan_and_finite_gradients(
    model: MossTTSDelayModel, dataset: SpeechDataset
) -> None:
    batch = dataset.collate_fn([dataset[0], dataset[1]])
    batch["labels"][..., 2] = -100
    output = model(**batch)
    output.loss.backward()
    assert output.loss.isnan()
    assert output.loss_all.isnan().tolist() == [False, False, True, False, False]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters())) - 1  # all but the unread table
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert not gradients["lm_heads.2.weight"].any()
    assert gradients["lm_heads.1.weight"].any()


def test_the_depth_model_reads_only_earlier_channels(model: MossTTSDelayModel) -> None:
    torch.manual_seed(0)
    entries = torch.randn(2, model.channels, model.config.local_hidden_size)
    changed = entries.clone()
    changed[:, 2] += 1.0
    first, second = (model.local_transformer(inputs_embeds=rows).last_hidden_state for rows in (entries, changed))
    same = [torch.equal(first[:, channel], second[:, channel]) for channel in range(model.channels)]
    assert same == [True, True, False, False, False]


def test_the_unread_table_stays_frozen(model: MossTTSDelayModel) -> None:
    table = model.get_parameter(UNREAD)
    assert not table.requires_grad
    table.requires_grad_(True)
    model.load_state_dict(model.state_dict())
    assert not table.requires_grad
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == [UNREAD]


def test_forward_refuses_what_it_cannot_mean(model: MossTTSDelayModel, dataset: SpeechDataset) -> None:
    batch = dataset.collate_fn([dataset[1]])
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="expected 5 values with a positive sum"):
        model(**batch, channelwise_loss_weight=[1.0, 2.0])
    with pytest.raises(ValueError, match="4 channels, expected 5"):
        model(input_ids=batch["input_ids"][..., :4])
