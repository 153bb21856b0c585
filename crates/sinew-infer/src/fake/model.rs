//! The distribution that a fake engine samples, and the draws from it.

use crate::constraint::Constraint;
use crate::sampler;
use crate::sequence::Sequence;
use sinew_grammar::Mask;
use sinew_types::{
    AdapterName, EngineError, GOLDEN_GAMMA, PolicyVersion, PromptLogprob, PromptLogprobs,
    SampledToken, SamplingParams, TokenId, TokenLogprob, mix_hash,
};

/// Probabilities of the tokens that can follow a prefix, the most likely first.
pub(super) const PROBABILITIES: [f32; 4] = [0.4, 0.3, 0.2, 0.1];

/// The distribution that [`FakeEngine`](super::FakeEngine) samples: after each prefix four tokens, or the
/// end.
///
/// The four have probabilities 0.4, 0.3, 0.2 and 0.1 at temperature 1; which ids they are is a hash
/// of seed and prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FakeModel {
    /// Number of token ids, at least 4.
    pub vocab: usize,
    /// Two models with different seeds have nothing in common.
    pub seed: u64,
    /// A token that is the only continuation of about one prefix in `.1`; `None`: outputs end only at limits.
    pub end: Option<(TokenId, u32)>,
}

/// Base of the polynomial that hashes a prefix: odd, so that every token changes the hash.
const BASE: u64 = GOLDEN_GAMMA;

/// Tokens that are hashed side by side.
const SIDE_BY_SIDE: usize = 8;

/// `BASE` to the powers from 0 to [`SIDE_BY_SIDE`].
const POWERS: [u64; SIDE_BY_SIDE + 1] = {
    let mut powers = [1u64; SIDE_BY_SIDE + 1];
    let mut i = 1;
    while i <= SIDE_BY_SIDE {
        powers[i] = powers[i - 1].wrapping_mul(BASE);
        i += 1;
    }
    powers
};

/// Contribution of a block of zero tokens to the hash: a token counts as one more than its id, so
/// that every token counts.
const ZEROS: u64 = {
    let (mut sum, mut i) = (0u64, 0);
    while i < SIDE_BY_SIDE {
        sum = sum.wrapping_add(POWERS[i]);
        i += 1;
    }
    sum
};

/// Extends the hash of a prefix, modulo 2^64: one product and one sum for each token, mostly
/// independent of each other, because prompts are long.
pub(super) fn hash_on(hash: u64, tokens: &[TokenId]) -> u64 {
    let (blocks, rest) = tokens.as_chunks::<SIDE_BY_SIDE>();
    let mut hash = hash;
    for &[a, b, c, d, e, f, g, h] in blocks {
        let term = |token: TokenId, power: usize| u64::from(token).wrapping_mul(POWERS[power]);
        let first = term(a, 7).wrapping_add(term(b, 6));
        let second = term(c, 5).wrapping_add(term(d, 4));
        let third = term(e, 3).wrapping_add(term(f, 2));
        let last = term(g, 1).wrapping_add(term(h, 0));
        let sum = first
            .wrapping_add(second)
            .wrapping_add(third.wrapping_add(last));
        let before = hash.wrapping_mul(POWERS[SIDE_BY_SIDE]);
        hash = before.wrapping_add(sum).wrapping_add(ZEROS);
    }
    for &token in rest {
        hash = hash.wrapping_mul(BASE).wrapping_add(u64::from(token) + 1);
    }
    hash
}

impl FakeModel {
    /// [`FakeModel::logprob_at`] temperature 1, in nats.
    pub fn logprob(&self, prefix: &[TokenId], token: TokenId) -> f32 {
        self.logprob_at(prefix, token, 1.0)
    }

    /// Natural log-probability of `token` after `prefix` at a temperature above 0. A token that would not be
    /// sampled there (a scripted one) has a stand-in value between -10 and -9.
    pub fn logprob_at(&self, prefix: &[TokenId], token: TokenId, temperature: f32) -> f32 {
        self.logprob_in(self.state(prefix), token, temperature)
    }

    /// The model under an adapter of this name: it has nothing in common with this one.
    #[must_use]
    pub fn adapted(self, name: &AdapterName) -> Self {
        let bytes = name.as_str().bytes();
        let hash = bytes.fold(0xADA7, |hash, byte| mix_hash(hash, u64::from(byte)));
        Self {
            seed: mix_hash(self.seed, hash),
            ..self
        }
    }

    /// The log-probabilities of a prompt that a request asks for.
    pub(super) fn score(&self, asked: &PromptLogprobs, prompt: &[TokenId]) -> Vec<PromptLogprob> {
        let places = asked.places(prompt.len());
        let mut hash = self.hash(&prompt[..places.start]);
        let mut scored = Vec::with_capacity(places.len());
        for position in places {
            let (state, token) = (mix_hash(hash, 0), prompt[position]);
            let logprob = |id: TokenId| self.logprob_in(state, id, 1.0);
            let likely = self.likely(state).into_iter().take(usize::from(asked.top));
            scored.push(PromptLogprob {
                position: position as u32,
                logprob: logprob(token),
                top: with_logprobs(likely, logprob),
                targets: asked
                    .targets_at(position)
                    .iter()
                    .map(|&id| logprob(id))
                    .collect(),
            });
            hash = hash_on(hash, &[token]);
        }
        scored
    }

    /// Tokens that can follow in this state, the most likely first.
    fn likely(&self, state: u64) -> Vec<TokenId> {
        match self.ends_at(state) {
            Some(end) => vec![end],
            None => {
                let ranks = 0..PROBABILITIES.len();
                ranks.map(|rank| self.candidate(state, rank)).collect()
            }
        }
    }

    /// The hash that decides about the token after a prefix.
    fn state(&self, prefix: &[TokenId]) -> u64 {
        mix_hash(self.hash(prefix), 0)
    }

    pub(super) fn hash(&self, prefix: &[TokenId]) -> u64 {
        hash_on(mix_hash(self.seed, 0x5EED), prefix)
    }

    /// The end token, if it is the only continuation in this state.
    fn ends_at(&self, state: u64) -> Option<TokenId> {
        let (end, mean) = self.end?;
        mix_hash(state, 1)
            .is_multiple_of(u64::from(mean.max(1)))
            .then_some(end)
    }

    /// The token of a rank: consecutive ids from a first one that the state selects.
    fn candidate(&self, state: u64, rank: usize) -> TokenId {
        ((state % self.vocab as u64) as usize + rank).rem_euclid(self.vocab) as TokenId
    }

    /// Log-probability as of [`FakeModel::logprob_at`], from the state of the prefix.
    pub(super) fn logprob_in(&self, state: u64, token: TokenId, temperature: f32) -> f32 {
        if let Some(end) = self.ends_at(state)
            && end == token
        {
            return 0.0;
        }
        let rank = (0..PROBABILITIES.len()).find(|&r| self.candidate(state, r) == token);
        match rank.filter(|_| self.ends_at(state).is_none()) {
            Some(rank) => logprob_of_rank(rank, &PROBABILITIES, temperature),
            None => unlikely(state, token),
        }
    }

    /// The first tokens of `mask` from the candidate on, around the end of the vocabulary: without a mask
    /// they are the candidates themselves.
    fn candidates(&self, state: u64, mask: &Mask) -> Vec<TokenId> {
        let first = self.candidate(state, 0);
        let allowed: Vec<TokenId> = mask.tokens().collect();
        let (before, after) = allowed.split_at(allowed.partition_point(|&t| t < first));
        let around = after.iter().chain(before).copied();
        around.take(PROBABILITIES.len()).collect()
    }

    /// Log-probability as of [`FakeModel::logprob_at`] for a token that `mask` allows, among all allowed
    /// ones, from the state of the prefix.
    fn logprob_of(&self, state: u64, token: TokenId, temperature: f32, mask: &Mask) -> f32 {
        let end = self.ends_at(state).filter(|&end| mask.allows(end));
        if mask.only() == Some(token) || end == Some(token) {
            return 0.0;
        }
        let candidates = self.candidates(state, mask);
        let rank = candidates.iter().position(|&t| t == token);
        match rank.filter(|_| end.is_none()) {
            Some(rank) => logprob_of_rank(rank, &PROBABILITIES[..candidates.len()], temperature),
            None => unlikely(state, token),
        }
    }

    /// The token at the end of `s`, which has a format. `scripted` is taken if the format allows it.
    pub(super) fn draw_constrained(
        &self,
        state: u64,
        s: &Sequence,
        constraint: &mut Constraint,
        scripted: Option<TokenId>,
        version: PolicyVersion,
    ) -> Result<SampledToken, EngineError> {
        let mask = constraint.mask()?;
        let candidates = self.candidates(state, &mask);
        let scripted = scripted.filter(|&t| mask.allows(t));
        let end = self.ends_at(state).filter(|&end| mask.allows(end));
        let id = scripted.or(end).unwrap_or_else(|| {
            let sampling = SamplingParams {
                logit_bias: Vec::new(),
                ..s.sampling.clone()
            };
            let logits = PROBABILITIES.map(f32::ln);
            let drawn = sampler::draw(&logits[..candidates.len()], &sampling, s.tokens.len());
            candidates[drawn.map_or(0, |d| d.id as usize)]
        });
        let temperature = s.sampling.policy_temperature();
        let logprob = |id: TokenId| self.logprob_of(state, id, temperature, &mask);
        let choice = constraint.accept(id, &mask, 0.0)?;
        Ok(SampledToken {
            choice: Some(choice),
            ..sampled(id, &candidates, s, version, logprob)
        })
    }

    /// The token at the end of `s`, with what a real engine reports about it.
    pub(super) fn draw(&self, state: u64, s: &Sequence, version: PolicyVersion) -> SampledToken {
        let (id, top) = match self.ends_at(state) {
            Some(end) => (end, vec![end]),
            None => {
                let tokens = [0, 1, 2, 3].map(|rank| self.candidate(state, rank));
                let mut sampling = s.sampling.clone();
                sampling.logit_bias.retain_mut(|(id, _)| {
                    let rank = tokens.iter().position(|t| t == id);
                    *id = rank.unwrap_or(0) as TokenId;
                    rank.is_some()
                });
                let logits = PROBABILITIES.map(f32::ln);
                let drawn = sampler::draw(&logits, &sampling, s.tokens.len());
                let rank = drawn.map_or(0, |d| d.id as usize);
                (tokens[rank], tokens.to_vec())
            }
        };
        let temperature = s.sampling.policy_temperature();
        let logprob = |id: TokenId| self.logprob_in(state, id, temperature);
        sampled(id, &top, s, version, logprob)
    }
}

/// Log-probability of the token of a rank among tokens with these probabilities at temperature 1.
fn logprob_of_rank(rank: usize, probabilities: &[f32], temperature: f32) -> f32 {
    let divided = |p: f32| p.ln() / temperature;
    let sum: f32 = probabilities.iter().map(|&p| divided(p).exp()).sum();
    divided(probabilities[rank]) - sum.ln()
}

/// Stand-in value between -10 and -9 for a token that would not be sampled.
fn unlikely(state: u64, token: TokenId) -> f32 {
    -10.0 + (mix_hash(state, u64::from(token)) % 1000) as f32 / 1000.0
}

/// Tokens with their log-probabilities.
fn with_logprobs(
    ids: impl IntoIterator<Item = TokenId>,
    logprob: impl Fn(TokenId) -> f32,
) -> Vec<TokenLogprob> {
    let entry = |id: TokenId| TokenLogprob {
        id,
        logprob: logprob(id),
    };
    ids.into_iter().map(entry).collect()
}

/// A token that follows `s`, with as many of the `likely` ones as were asked for.
fn sampled(
    id: TokenId,
    likely: &[TokenId],
    s: &Sequence,
    version: PolicyVersion,
    logprob: impl Fn(TokenId) -> f32,
) -> SampledToken {
    let count = usize::from(s.sampling.top_logprobs);
    SampledToken {
        id,
        logprob: logprob(id),
        version,
        top: with_logprobs(likely.iter().copied().take(count), logprob),
        choice: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However the tokens arrive the hash is the same, and it is that of no other prefix.
        #[test]
        fn a_hash_goes_on_and_tells_prefixes_apart(
            tokens in prop::collection::vec(0u32..9, 1..60),
            cut in 0usize..60,
            change in 0usize..60,
        ) {
            let whole = hash_on(1, &tokens);
            let (before, after) = tokens.split_at(cut.min(tokens.len()));
            prop_assert_eq!(hash_on(hash_on(1, before), after), whole);
            let one_by_one = tokens.iter().fold(1, |hash, &t| hash_on(hash, &[t]));
            prop_assert_eq!(one_by_one, whole);
            let mut other = tokens.clone();
            other[change % tokens.len()] += 1;
            prop_assert_ne!(hash_on(1, &other), whole);
            other.clone_from(&tokens);
            other.reverse();
            prop_assert_eq!(hash_on(1, &other) == whole, other == tokens);
            prop_assert_ne!(hash_on(1, &tokens[1..]), whole);
        }
    }
}
