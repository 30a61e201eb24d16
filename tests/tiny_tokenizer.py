"""A tokenizer for tests, with one token for each letter, digit and sign of ASCII: 97 tokens."""


def write_tiny_tokenizer(directory):
    tiny_tokenizer().save_pretrained(directory)


def tiny_tokenizer():
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(32, 127)]
    model = models.WordLevel({token: index for index, token in enumerate(["<unk>", "<end>", *letters])}, "<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return fast
