"""The sweep file that ``lptctl sweep new`` writes."""

TEMPLATE = """\
# yaml-language-server: $schema=./sweep.schema.json   (make it with: lptctl sweep schema > sweep.schema.json)
version: 1
name: my-sweep                  # folder below runs/
executor: local

base:                           # settings of every run, nested or dotted
  model: llama3_nano            # or {name: llama3_nano, n_layers: 8}; see docs/sweep-file.md
  data:
    source: stdlib              # or [texts/**/*.txt, more.jsonl], or a folder made by `lptctl data prepare`
    tokenizer: byte             # or bpe:2048
  training:
    steps: 200
    seq_len: 256
    global_batch_size: 8
    local_batch_size: 8
    compute_dtype: float32      # bfloat16 on a GPU
  optimizer.lr: 3e-3
  validation.every: 25

sweep:
  grid:                         # the product of all lists
    recipe: [bf16, baseline, lpt]   # `lptctl recipes list` shows them all
    seed: [1, 2, 3]             # same seed = same weights and batches, so differences are paired
  # zip: [{optimizer.lr: [1e-3, 3e-3], training.global_batch_size: [8, 16]}]   # values that move together
  # exclude: [{recipe: lpt, seed: 3}]
  # include: [{recipe: uos, seed: 1}]
"""
