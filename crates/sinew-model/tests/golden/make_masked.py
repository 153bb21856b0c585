"""Makes golden log-probabilities, entropies and gradients over allowed tokens alone (PyTorch, f32, CPU).

Run after make_tiny.py: python make_masked.py     (torch 2.15, transformers 5.23, safetensors 0.8)

For the llama model and the packed sequences of its `golden.safetensors`, `masked.safetensors` beside it holds
  allowed              [rows, vocab], 1 where the next token may be; all ones: no mask
  temperature          [rows], divides the logits
  other                [rows], another allowed token, as a teacher names it (the next one where there is no other)
  weight, other_weight, entropy_weight  [rows]: loss = sum(weight * logprob(next token)
                       + other_weight * logprob(other) + entropy_weight * entropy), the distribution being the softmax
                       over allowed tokens
  logprob, other_logprob, entropy  [rows], 0 where a sequence ends
  grad.NAME            gradient of the loss by each parameter
"""
import pathlib

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

FOLDER = pathlib.Path(__file__).parent / "llama"
# Number of the 97 tokens that may follow, row after row; 97: no mask.
COUNTS = [97, 1, 2, 31, 32, 33, 96, 5, 64]

generator = torch.Generator().manual_seed(11)
plain = load_file(FOLDER / "golden.safetensors")
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager").eval()
tokens, lengths = plain["tokens"].long(), plain["lengths"].long().tolist()
rows, vocab = plain["logits"].shape

target, has_next, logits, at = [], [], [], 0
for n in lengths:
    part = tokens[at:at + n]
    target.append(torch.cat([part[1:], part[:1]]))
    has_next.append((torch.arange(n) < n - 1).float())
    logits.append(model(part[None]).logits[0])
    at += n
target, has_next, logits = map(torch.cat, (target, has_next, logits))

allowed, other = torch.zeros(rows, vocab), target.clone()
for row in range(rows):
    count = COUNTS[row % len(COUNTS)]
    order = torch.randperm(vocab, generator=generator)
    order = torch.cat([target[row:row + 1], order[order != target[row]]])[:count]
    allowed[row, order] = 1
    if count > 1:
        other[row] = order[1]
temperature = torch.tensor([0.7, 1.0, 1.2]).repeat(rows)[:rows]
draw = lambda scale: scale * torch.randn(rows, generator=generator)
weight, other_weight, entropy_weight = draw(1.0), draw(0.5), draw(0.3)

divided = (logits / temperature[:, None]).masked_fill(allowed == 0, float("-inf"))
lp = torch.log_softmax(divided, -1)
pick = lambda ids: lp.gather(1, ids[:, None])[:, 0] * has_next
logprob, other_logprob = pick(target), pick(other)
# Barred tokens have probability 0 and add nothing.
entropy = -(lp.exp() * lp.masked_fill(allowed == 0, 0.0)).sum(-1) * has_next
(weight * logprob + other_weight * other_logprob + entropy_weight * entropy).sum().backward()
result = dict(allowed=allowed, temperature=temperature, other=other.float(), weight=weight,
              other_weight=other_weight, entropy_weight=entropy_weight, logprob=logprob,
              other_logprob=other_logprob, entropy=entropy)
for name, p in model.named_parameters():
    result["grad." + name] = p.grad
save_file({k: v.detach().contiguous() for k, v in result.items()}, FOLDER / "masked.safetensors")
print({k: tuple(v.shape) for k, v in result.items() if not k.startswith("grad")})
