"""Makes the model of the tests: a Llama of two small layers, and a byte-level BPE tokenizer trained on the spot.

``python make_model.py FOLDER`` with the interpreter of the environment that holds vLLM. The weights are drawn by the
server itself (``--load-format dummy``), so the folder holds a configuration and a tokenizer only. What the model says
is noise; what it counts is what the tests are about.
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

_TEXT = (
    "A trim tab is a small surface at the trailing edge of a rudder.",
    "It moves the rudder, and the rudder moves the ship.",
    "Requests arrive, wait in a queue, are computed and leave again.",
    "zero one two three four five six seven eight nine ten eleven twelve",
)
_CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def make(folder: Path) -> None:
    """Write the model into ``folder``, which is made where it is not there."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = _CHAT_TEMPLATE
    fast.model_max_length = 4096
    fast.save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
    ).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
