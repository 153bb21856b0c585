"""Golden vectors of the algorithms, from the papers' formulas in padded PyTorch tensors.

Run with any Python that has torch: `python make_algorithms.py > algorithms.json`.

Written apart from the Rust code and in another form: [episodes, tokens] tensors with masks, the
carry form of the recursions, and weights as derivatives (autograd) of the aggregated loss by
the token losses.
"""

import json
import sys

import torch

torch.manual_seed(7)
torch.set_default_dtype(torch.float64)
F = torch.nn.functional


def rounded(shape, scale=1.0, shift=0.0):
    return [round(x, 4) for x in (torch.randn(shape) * scale + shift).flatten().tolist()]


# ---------------------------------------------------------------- the batch
REWARDS = [[1.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [-0.5, 0.25, 2.0, 0.25]]
# Kinds and environments cut the batch in different ways: neither can stand for the other.
KINDS = ["find", "count", "count", "find"]
ENVIRONMENTS = ["web", "web", "shell", "shell"]
STATES = [11, 12, 13]


def make_batch():
    episodes = []
    for g, rewards in enumerate(REWARDS):
        for i, reward in enumerate(rewards):
            turns = []
            for k in range(1 + (g + 2 * i) % 3):
                n = 1 + int(torch.randint(1, 5, (1,)))
                turns.append({
                    "before": 2 + (k + i) % 3,
                    "state": STATES[int(torch.randint(0, 3, (1,)))] if k else 10,
                    "sampled": n,
                    "process": round(float(torch.randn(())) * 0.3, 3) if (i + k) % 2 else 0.0,
                    "logprobs": [-abs(x) for x in rounded(n, 0.5, -0.7)],
                    "values": rounded(n, 0.4, 0.2),
                    "ref": [-abs(x) for x in rounded(n, 0.5, -0.8)],
                    "prox": [-abs(x) for x in rounded(n, 0.5, -0.7)],
                })
            episodes.append({
                "group": f"g{g}", "kind": KINDS[g], "environment": ENVIRONMENTS[g],
                "reward": reward,
                "success": reward >= 1.0, "truncated": (g, i) in [(0, 3), (3, 1)],
                "tool_calls": 3 + i, "tool_errors": (i * 2) % 3,
                "format_penalty": round(0.4 * ((g + i) % 3), 3), "turns": turns,
            })
    return episodes


EPISODES = make_batch()
B = len(EPISODES)
GROUP = torch.tensor([int(e["group"][1:]) for e in EPISODES])
KIND = torch.tensor([0 if e["kind"] == "find" else 1 for e in EPISODES])
ENVIRONMENT = torch.tensor([0 if e["environment"] == "web" else 1 for e in EPISODES])
REWARD = torch.tensor([e["reward"] for e in EPISODES])
SUCCESS = torch.tensor([e["success"] for e in EPISODES])
TRUNCATED = torch.tensor([e["truncated"] for e in EPISODES])
T = max(sum(t["before"] + t["sampled"] for t in e["turns"]) for e in EPISODES)
MASK = torch.zeros(B, T)
TURN = torch.full((B, T), -1)
COLUMNS = {name: torch.full((B, T), 0.0) for name in ["logprobs", "values", "ref", "prox"]}
for b, e in enumerate(EPISODES):
    at = 0
    for k, turn in enumerate(e["turns"]):
        at += turn["before"]
        end = at + turn["sampled"]
        MASK[b, at:end] = 1
        TURN[b, at:end] = k
        for name, column in COLUMNS.items():
            column[b, at:end] = torch.tensor(turn[name])
        at = end
PROCESS = [[t["process"] for t in e["turns"]] for e in EPISODES]
LAST = torch.tensor([int(MASK[b].nonzero()[-1]) for b in range(B)])
TURN_ENDS = [[int((TURN[b] == k).nonzero()[-1]) for k in range(len(p))] for b, p in enumerate(PROCESS)]
TOTAL = REWARD + torch.tensor([sum(p) for p in PROCESS])


# ---------------------------------------------------------------- advantages
def per_group(f, x):
    """`f` on the members of each group; returns values in place."""
    out = torch.zeros_like(x)
    for g in GROUP.unique():
        members = GROUP == g
        out[members] = f(x[members])
    return out


def grpo(x, eps=1e-6):
    return (x - x.mean()) / (x.std(unbiased=True) + eps) if x.max() > x.min() else x * 0


def spread(x):
    return x[:, None] * MASK


def whiten(a, mask, scope=None):
    scope = torch.zeros(B, dtype=torch.long) if scope is None else scope
    out = a.clone()
    for s in scope.unique():
        rows = (scope == s)[:, None] & (mask > 0)
        values = a[rows]
        std = values.var(unbiased=False).clamp(min=1e-8).sqrt()
        rows = (scope == s)[:, None] & (MASK > 0)
        out[rows] = (a[rows] - values.mean()) / std
    return out


def token_rewards(kl=0.0):
    rho = -kl * (COLUMNS["logprobs"] - COLUMNS["ref"]) * MASK
    for b in range(B):
        for k, end in enumerate(TURN_ENDS[b]):
            rho[b, end] += PROCESS[b][k]
        rho[b, LAST[b]] += REWARD[b]
    return rho


def returns_to_go(rho, gamma):
    running = torch.zeros(B)
    out = torch.zeros(B, T)
    for t in reversed(range(T)):
        m = MASK[:, t]
        running = m * (rho[:, t] + gamma * running) + (1 - m) * running
        out[:, t] = running * m
    return out


def gae(rho, gamma, lam):
    values = COLUMNS["values"]
    running, following = torch.zeros(B), torch.zeros(B)
    out = torch.zeros(B, T)
    for t in reversed(range(T)):
        m = MASK[:, t]
        delta = rho[:, t] + gamma * following - values[:, t]
        running = m * (delta + gamma * lam * running) + (1 - m) * running
        following = m * values[:, t] + (1 - m) * following
        out[:, t] = running * m
    return out, (out + values) * MASK


def bi_level(gamma_turn, lambda_turn, gamma, lam):
    """VAGEN, arXiv 2510.16907: a turn's value is the one at its last token."""
    values = COLUMNS["values"]
    adv, ret = torch.zeros(B, T), torch.zeros(B, T)
    for b in range(B):
        running, following = 0.0, 0.0
        for k in reversed(range(len(PROCESS[b]))):
            where = (TURN[b] == k).nonzero().flatten().tolist()
            end = values[b, where[-1]]
            r = PROCESS[b][k] + (REWARD[b] if k == len(PROCESS[b]) - 1 else 0.0)
            delta = r + gamma_turn * following - end
            running = delta + gamma_turn * lambda_turn * running
            following = end
            turn_return = running + end
            # tokens of the turn, from the definition as a double sum
            n = len(where)
            v = [values[b, t] for t in where] + [torch.tensor(0.0)]
            rho = [0.0] * (n - 1) + [turn_return]
            deltas = [rho[j] + gamma * v[j + 1] - v[j] for j in range(n)]
            for j, t in enumerate(where):
                adv[b, t] = sum((gamma * lam) ** (l - j) * deltas[l] for l in range(j, n))
                ret[b, t] = adv[b, t] + v[j]
    return adv, ret


def gigpo(omega, gamma, eps=1e-6):
    out = spread(per_group(grpo, TOTAL))
    for g in GROUP.unique().tolist():
        visits = {}
        for b in (GROUP == g).nonzero().flatten().tolist():
            rewards = list(PROCESS[b])
            rewards[-1] += float(REWARD[b])
            for k, turn in enumerate(EPISODES[b]["turns"]):
                value = sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards)))
                visits.setdefault(turn["state"], []).append((b, k, value))
        for found in visits.values():
            x = torch.tensor([v for _, _, v in found])
            if len(found) < 2 or x.max() - x.min() < 1e-12:
                continue
            for (b, k, _), a in zip(found, (x - x.mean()) / (x.std(unbiased=True) + eps)):
                out[b] += omega * a * (TURN[b] == k)
    return out


def process_apart(weight):
    out = spread(per_group(grpo, REWARD))
    for g in GROUP.unique().tolist():
        members = (GROUP == g).nonzero().flatten().tolist()
        x = torch.tensor([r for b in members for r in PROCESS[b]])
        mean, std = x.mean(), x.std(unbiased=True) + 1e-6
        for b in members:
            for k in range(len(PROCESS[b])):
                tail = sum((r - mean) / std for r in PROCESS[b][k:])
                out[b] += weight * tail * (TURN[b] == k)
    return out


# ---------------------------------------------------------------- weights
def aggregate(loss, mask, mode, length=None):
    """The usual `agg_loss`; rows without trainable tokens are not in the batch."""
    rows = mask.sum(-1) > 0
    loss, mask = loss[rows], mask[rows]
    if mode == "token_mean":
        return (loss * mask).sum() / mask.sum()
    if mode == "sequence_mean_token_mean":
        return ((loss * mask).sum(-1) / mask.sum(-1)).mean()
    if mode == "sequence_mean_token_sum":
        return (loss * mask).sum(-1).mean()
    if mode == "sequence_mean_token_sum_norm":
        return (loss * mask).sum(-1).mean() / length
    return (loss * mask).sum()


def weights(mask, mode, length=None):
    loss = torch.zeros(B, T, requires_grad=True)
    aggregate(loss, mask, mode, length).backward()
    return loss.grad


def equal_groups(x):
    return per_group(lambda v: torch.full_like(v, float(v.max() == v.min())), x) > 0


def top_std(share):
    stds = {g: float(TOTAL[GROUP == g].std(unbiased=True)) for g in GROUP.unique().tolist()}
    kept = sorted(stds, key=lambda g: -stds[g])[: max(1, round(len(stds) * share))]
    return torch.tensor([g in kept for g in GROUP.tolist()])


def roc(x, keep, minimum=2):
    """Of 4: the successes with the least tool errors and format faults, failures as they came."""
    kept = torch.zeros(B, dtype=torch.bool)
    for g in GROUP.unique().tolist():
        members = (GROUP == g).nonzero().flatten().tolist()
        good = [b for b in members if x[b] > 0]
        bad = [b for b in members if x[b] <= 0]
        want = round(len(good) * keep / len(members))
        want = max(want, min(minimum, len(good)), keep - len(bad))
        want = min(want, keep - min(minimum, len(bad))) if keep - len(bad) <= keep - min(minimum, len(bad)) else want
        score = lambda b: (EPISODES[b]["tool_errors"] / EPISODES[b]["tool_calls"]
                           + EPISODES[b]["format_penalty"])
        chosen = sorted(good, key=score)[:want]
        for b in chosen + bad[: keep - len(chosen)]:
            kept[b] = True
    return kept


CASES = []
FACTS = {"group_size": 4, "reference": False, "teacher": False, "critic": False}


def case(name, config, advantages, mask=MASK, mode="sequence_mean_token_mean", length=None,
         returns=None, silent=True, **facts):
    """`silent`: rows whose advantages are all 0 are left out (their weights still count)."""
    w = weights(mask, mode, length)
    out = []
    for b in range(B):
        sampled = MASK[b] > 0
        trained = bool((mask[b] > 0).any())
        if silent and not bool((advantages[b][sampled].abs() > 1e-12).any()):
            trained = False
        if not trained:
            out.append(None)
            continue
        entry = {"advantages": advantages[b][sampled].tolist(), "weights": w[b][sampled].tolist()}
        if returns is not None:
            entry["returns"] = returns[b][sampled].tolist()
        out.append(entry)
    CASES.append({"name": name, "config": config, "facts": FACTS | facts, "expected": out})


def rows(condition):
    return MASK * condition[:, None]


def main():
    group = per_group(grpo, TOTAL)
    ref = {"reference": True}
    critic = {"critic": True}
    taught = {"teacher": True}
    case("grpo", {"type": "grpo"}, spread(group))
    case("grpo trl", {"type": "grpo", "dialect": "trl"},
         spread(per_group(lambda x: grpo(x, 1e-4), TOTAL)), mode="token_mean")
    case("grpo masked truncation", {"type": "grpo", "truncated": "mask"},
         spread(group), mask=rows(~TRUNCATED))
    # DAPO, equation 13: nothing below the buffer, the whole factor above the limit.
    shaped = TOTAL - torch.clamp((MASK.sum(-1) - (9 - 6)) / 6, 0, 1) * 0.5
    case("grpo overlong",
         {"type": "grpo", "overlong": {"max_tokens": 9, "buffer_tokens": 6, "factor": 0.5}},
         spread(per_group(grpo, shaped)))
    clipped = ((REWARD + 0.5) * 2).clamp(-1.5, 1.5)
    case("grpo shaped rewards",
         {"type": "grpo", "process": {"type": "ignore"},
          "rewards": {"bias": 0.5, "scale": 2.0, "clip": 1.5}},
         spread(per_group(grpo, clipped)))
    case("grpo process apart", {"type": "grpo", "process": {"type": "separate", "weight": 0.7}},
         process_apart(0.7))
    centred = per_group(lambda x: x - x.mean(), TOTAL)
    # AutoForge, arXiv 2512.22857, equation 4: the mean is the group's, the deviation that of the
    # rewards of all episodes of the environment.
    environment = torch.zeros(B)
    for k in ENVIRONMENT.unique():
        of = ENVIRONMENT == k
        environment[of] = centred[of] / (TOTAL[of].std(unbiased=True) + 1e-6)
    case("process_grpo", {"type": "process_grpo"}, process_apart(1.0))
    case("erpo", {"type": "erpo"}, spread(environment))
    case("environment std",
         {"type": "grpo", "scale": {"type": "environment_std", "epsilon": 1e-6}},
         spread(environment))
    case("task normalization", {"type": "grpo", "normalize": "task"},
         whiten(spread(group), MASK, GROUP))
    # AgentRL, arXiv 2510.04206: a task is what a benchmark is made of (a web shop, a database),
    # not one prompt. Mean and deviation are over all tokens of it in the batch.
    case("agent_rl", {"type": "agent_rl"}, whiten(spread(group), MASK, ENVIRONMENT))
    case("environment normalization", {"type": "rloo", "normalize": "environment"},
         whiten(spread(per_group(lambda x: x - (x.sum() - x) / (len(x) - 1), TOTAL)), MASK,
                ENVIRONMENT), mode="sequence_mean_token_sum")
    case("kind normalization", {"type": "grpo", "normalize": "kind"},
         whiten(spread(group), MASK, KIND))
    case("dr_grpo", {"type": "dr_grpo"}, spread(centred),
         mode="sequence_mean_token_sum_norm", length=1024.0)
    useful = ~equal_groups(TOTAL)
    case("dapo", {"type": "dapo"}, spread(group), mask=rows(useful & ~TRUNCATED),
         mode="token_mean")
    outcome_only = {"process": {"type": "ignore"}}
    case("dapo drops", {"type": "dapo"} | outcome_only, spread(per_group(grpo, REWARD)),
         mask=rows(~equal_groups(REWARD) & ~TRUNCATED), mode="token_mean")
    for name in ["gspo", "sapo"]:
        case(name, {"type": name}, spread(group))
    case("cispo", {"type": "cispo"}, spread(group), mode="token_mean")
    max_rl = per_group(lambda x: (x - x.mean()) / x.mean() if x.mean() > 0 else x * 0, REWARD)
    case("max_rl", {"type": "max_rl"} | outcome_only, spread(max_rl), mode="token_mean")
    case("starpo_s", {"type": "starpo_s"}, spread(group), mask=rows(top_std(0.25)))
    case("starpo_s half", {"type": "starpo_s", "keep_top_std": 0.5}, spread(group),
         mask=rows(top_std(0.5)))
    # Half of one success is a tie, which the released code rounds to the even number.
    for name, x, minimum, more in [("grpo_roc", TOTAL, 1, {}),
                                   ("grpo_roc ties", REWARD, 0, outcome_only)]:
        kept = roc(x, 2, minimum)
        resampled = torch.zeros(B)
        for g in GROUP.unique():
            members = (GROUP == g) & kept
            resampled[members] = grpo(x[members])
            if x[members].max() == x[members].min():
                kept[members] = False
        config = {"type": "grpo_roc", "resample": {"keep": 2, "minimum": minimum}}
        case(name, config | more, spread(resampled), mask=rows(kept), mode="token_mean")
    case("gigpo", {"type": "gigpo"}, gigpo(1.0, 0.95))
    case("gigpo mean", {"type": "gigpo", "omega": 0.5, "gamma": 0.8}, gigpo(0.5, 0.8))
    rloo = per_group(lambda x: x - (x.sum() - x) / (len(x) - 1), TOTAL)
    case("rloo", {"type": "rloo"}, spread(rloo), mode="sequence_mean_token_sum")
    penalty = (0.1 * (COLUMNS["logprobs"] - COLUMNS["ref"]) * MASK).sum(-1)
    with_kl = per_group(lambda x: x - (x.sum() - x) / (len(x) - 1), TOTAL - penalty)
    case("rloo kl in reward",
         {"type": "rloo", "kl": {"place": "reward", "coefficient": 0.1}},
         spread(with_kl), mode="sequence_mean_token_sum", **ref)
    case("reinforce", {"type": "reinforce"}, spread(TOTAL), mode="sequence_mean_token_sum")
    case("reinforce_pp", {"type": "reinforce_pp"},
         whiten(returns_to_go(token_rewards(), 1.0), MASK), mode="token_mean")
    case("reinforce_pp discounted",
         {"type": "reinforce_pp", "gamma": 0.9, "truncated": "mask",
          "kl": {"place": "reward", "coefficient": 0.05}},
         whiten(returns_to_go(token_rewards(0.05), 0.9), rows(~TRUNCATED)),
         mask=rows(~TRUNCATED), mode="token_mean", **ref)
    case("reinforce_pp_baseline", {"type": "reinforce_pp_baseline"},
         whiten(spread(centred), MASK), mode="token_mean")
    a, r = gae(token_rewards(), 1.0, 1.0)
    case("ppo", {"type": "ppo"}, whiten(a, MASK), mode="token_mean", returns=r, silent=False,
         **critic)
    a, r = gae(token_rewards(0.02), 0.99, 0.9)
    case("ppo discounted",
         {"type": "ppo", "gamma": 0.99, "lambda": 0.9, "normalize": "none",
          "kl": {"place": "reward", "coefficient": 0.02}},
         a, mode="token_mean", returns=r, silent=False, **(critic | ref))
    a, r = bi_level(0.95, 1.0, 1.0, 1.0)
    case("turn_ppo", {"type": "turn_ppo"}, whiten(a, MASK), mode="token_mean", returns=r,
         silent=False, **critic)
    a, r = bi_level(0.9, 0.8, 0.97, 0.7)
    case("turn_ppo discounted",
         {"type": "turn_ppo", "normalize": "none", "gamma_turn": 0.9, "lambda_turn": 0.8,
          "gamma": 0.97, "lambda": 0.7},
         a, mode="token_mean", returns=r, silent=False, **critic)
    case("decoupled_ppo", {"type": "decoupled_ppo"}, spread(group), mode="token_mean")
    teacher = (COLUMNS["ref"] - COLUMNS["logprobs"]) * MASK
    case("opd", {"type": "opd"}, teacher, mode="token_mean", **taught)
    # The divergence itself is the trainer's: sinew-train/tests/golden/teacher.json.
    case("opd_top_k", {"type": "opd_top_k"}, torch.zeros(B, T), mode="token_mean", silent=False,
         **taught)
    case("grpo with a teacher", {"type": "grpo", "distill": 0.3},
         spread(group) + 0.3 * teacher, **taught)
    case("sft", {"type": "sft"}, MASK.clone(), mask=rows(SUCCESS), mode="token_mean")
    dpo()
    json.dump(short({"episodes": EPISODES, "cases": CASES}), sys.stdout, separators=(",", ":"))
    print()


def short(x):
    """Numbers to nine significant digits."""
    if isinstance(x, dict):
        return {k: short(v) for k, v in x.items()}
    if isinstance(x, list):
        return [short(v) for v in x]
    return float(f"{x:.9g}") if isinstance(x, float) else x


def dpo(beta=0.1):
    """Expected is the loss's own gradient: `gradient = −weight · advantage`."""
    logp = COLUMNS["prox"].clone().requires_grad_()
    ratio = ((logp - COLUMNS["ref"]) * MASK).sum(-1)
    losses = []
    for g in GROUP.unique().tolist():
        members = (GROUP == g).nonzero().flatten().tolist()
        best = max(members, key=lambda b: float(TOTAL[b]))
        worst = min(members, key=lambda b: float(TOTAL[b]))
        losses.append(-F.logsigmoid(beta * (ratio[best] - ratio[worst])))
    loss = torch.stack(losses).mean()
    loss.backward()
    expected = []
    for b in range(B):
        gradient = logp.grad[b][MASK[b] > 0]
        trained = bool((gradient != 0).any())
        expected.append({"gradient": gradient.tolist()} if trained else None)
    CASES.append({"name": "dpo", "config": {"type": "dpo"}, "loss": loss.item(),
                  "facts": FACTS | {"reference": True}, "expected": expected})


main()
