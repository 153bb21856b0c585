//! The decisions about one forward pass: its rows, the blocks that it writes, and the tokens that it draws.
//!
//! Order of a pass: sequences that generate, one row each; prompts that have begun; waiting requests by
//! priority and arrival, as far as rows, sequences and blocks suffice; and, only if rows are left and none
//! waits, draft tokens. Prompts whose log-probabilities are asked for are cut in pieces that need few
//! logits at once.

use super::{Scheduler, grouping};
use crate::blocks::{Parent, PrefixMatch};
use crate::forward::{Batch, BatchSequence, BlockCopy, BlockId};
use crate::sequence::{OrderKey, Sequence};
use sinew_types::TokenId;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// One pass: copies, then the forward pass, then copies, then sampling.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Copies to carry out before the forward pass, in order.
    pub(crate) copies_before: Vec<BlockCopy>,
    /// The rows, as the device gets them.
    pub(crate) batch: Batch,
    /// Copies of keys and values that the forward pass stores.
    pub(crate) copies_after: Vec<BlockCopy>,
    /// The sequences that draw a token, and the rows of the logits that they draw from. Requests
    /// with the same tokens can share a row.
    pub(crate) samples: Vec<SampleSlot>,
    /// Rows of prompts whose log-probabilities are taken.
    pub(crate) scores: Vec<ScoreSlot>,
    /// Sequences that would lose their state if the pass failed.
    pub(crate) members: Vec<OrderKey>,
    /// Blocks that the pass writes.
    pub(crate) written: Vec<BlockId>,
    /// Sources of copies, kept from eviction until the pass is over.
    pub(crate) pins: Vec<BlockId>,
    /// Tokens of prompts (and of outputs to be recomputed) in the batch.
    pub(crate) prefill_tokens: usize,
    /// Blocks that prefills write in this pass.
    prefilled: HashSet<BlockId>,
    /// Row of the logits after the first `.1` tokens of block `.0`.
    logits_at: HashMap<(BlockId, usize), usize>,
    /// Whether a sequence reaches the end of its known tokens in this pass.
    prefill_ends: bool,
    /// Rows that can still be added to `scores`.
    scores_left: usize,
}

/// A token to be drawn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SampleSlot {
    pub(crate) key: OrderKey,
    /// Row of the logits.
    pub(crate) logits: usize,
    /// Draft tokens at the end of the sequence; a row of logits follows for each.
    pub(crate) drafted: usize,
}

/// Consecutive rows of a prompt whose log-probabilities are taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScoreSlot {
    pub(crate) key: OrderKey,
    /// First row of the logits.
    pub(crate) logits: usize,
    /// Position of the token that the first row predicts.
    pub(crate) position: usize,
    pub(crate) count: usize,
}

/// A sequence of this pass with exactly the tokens of a waiting one, which can share all its work:
/// several samples of one prompt.
struct Twin {
    full: Vec<BlockId>,
    last: BlockId,
    /// Slots of `last` in use.
    slots: usize,
    logits: usize,
}

/// Whether a waiting sequence can start in this pass.
enum Admission {
    /// It starts on the blocks that were found.
    Run(PrefixMatch),
    /// Another sequence computes a part of its prompt in this pass; later it finds that part
    /// stored.
    Wait,
    /// There are not enough blocks.
    NoBlocks,
}

/// Asks for the logits of `needed` rows of a sequence, whose row at position `past` is `first_row` of the
/// batch.
fn add_scores(plan: &mut Plan, key: OrderKey, needed: Range<usize>, first_row: usize, past: usize) {
    if needed.is_empty() {
        return;
    }
    plan.scores.push(ScoreSlot {
        key,
        logits: plan.batch.logit_rows.len(),
        position: needed.start + 1,
        count: needed.len(),
    });
    plan.scores_left = plan.scores_left.saturating_sub(needed.len());
    let rows = needed.map(|position| first_row + position - past);
    plan.batch.logit_rows.extend(rows);
}

impl Plan {
    /// Number of tokens that the forward pass computes.
    pub(crate) fn rows(&self) -> usize {
        self.batch.tokens.len()
    }
}

impl Scheduler {
    /// Decides the next pass; `None` if there is nothing to compute.
    pub(crate) fn plan(&mut self) -> Option<Plan> {
        self.blocks.advance();
        let mut plan = Plan {
            scores_left: self.prompt_rows,
            ..Plan::default()
        };
        let mut budget = self.config.max_batched_tokens;
        self.plan_running(&mut plan, &mut budget);
        self.plan_waiting(&mut plan, &mut budget);
        grouping::group_by_adapter(&mut plan);
        (plan.rows() > 0).then_some(plan)
    }

    /// Running sequences, best first. When blocks run out the worst is preempted, so a
    /// sequence that is planned already never is.
    fn plan_running(&mut self, plan: &mut Plan, budget: &mut usize) {
        let keys: Vec<OrderKey> = self.running.keys().copied().collect();
        let mut single = self.running.values().filter(|s| s.remaining() == 1).count();
        let mut spare = self.rows_for_drafts(single);
        for key in keys {
            let Some(mut sequence) = self.running.remove(&key) else {
                continue; // preempted for one before it
            };
            let remaining = sequence.remaining();
            if remaining == 1 {
                single = single.saturating_sub(1);
            }
            // Sequences that generate are never delayed by long prompts.
            let rows = remaining.min(budget.saturating_sub(single));
            let rows = sequence.rows_within(rows, plan.scores_left);
            if rows == 0 {
                self.running.insert(key, sequence);
                continue;
            }
            let mut rows = self.free_blocks_for(key, &sequence, rows);
            if rows == 0 {
                self.preempt(key, sequence);
                continue;
            }
            let drafted = self.draft(&mut sequence, spare.div_ceil(single + 1));
            spare -= drafted;
            rows += drafted;
            self.add_rows(plan, key, &mut sequence, rows, drafted);
            *budget -= rows;
            self.running.insert(key, sequence);
        }
    }

    /// Rows for the verification of draft tokens. Only when all sequences generate and none waits: while
    /// weights are read for a few rows, some more cost little.
    fn rows_for_drafts(&mut self, single: usize) -> usize {
        if !self.waiting.is_empty() || single < self.running.len() {
            return 0;
        }
        let rows = self.config.speculative_tokens;
        let rows = rows.min(self.config.max_batched_tokens);
        let rows = rows.saturating_sub(single);
        if rows == 0 || !self.acceptance.drafts_now() {
            return 0;
        }
        rows
    }

    /// Appends a draft of up to `limit` tokens to a sequence that generates; returns its length. It
    /// takes no block that another sequence needs.
    fn draft(&mut self, sequence: &mut Sequence, limit: usize) -> usize {
        if limit == 0 {
            return 0;
        }
        let block_tokens = self.blocks.block_tokens();
        let open = sequence.chain.len() * block_tokens - sequence.computed;
        let spared = self.blocks.available();
        let spared = spared.saturating_sub(self.running.len() + 1);
        let space = (open + spared * block_tokens).saturating_sub(1);
        let count = limit.min(space).min(sequence.draftable(self.context()));
        let draft = self.drafts.draft(&sequence.tokens, count);
        sequence.tokens.extend_from_slice(draft);
        draft.len()
    }

    /// Preempts sequences worse than `key` until `rows` more tokens have blocks; returns the number
    /// of tokens that have.
    fn free_blocks_for(&mut self, key: OrderKey, sequence: &Sequence, rows: usize) -> usize {
        let block_tokens = self.blocks.block_tokens();
        let open = sequence.chain.len() * block_tokens - sequence.computed;
        let needed = rows.saturating_sub(open).div_ceil(block_tokens);
        while self.blocks.available() < needed {
            match self.running.last_entry() {
                Some(worst) if *worst.key() > key => {
                    let (key, sequence) = worst.remove_entry();
                    self.preempt(key, sequence);
                }
                _ => break,
            }
        }
        rows.min(open + self.blocks.available() * block_tokens)
    }

    /// Puts the next `rows` tokens of a sequence into the batch and into blocks. The last
    /// `drafted` of them are draft tokens.
    fn add_rows(
        &mut self,
        plan: &mut Plan,
        key: OrderKey,
        sequence: &mut Sequence,
        rows: usize,
        drafted: usize,
    ) {
        let past = sequence.computed;
        let new = past..past + rows;
        let first_row = plan.batch.tokens.len();
        let tokens = &sequence.tokens[new.clone()];
        plan.batch.tokens.extend_from_slice(tokens);
        self.fill_blocks(plan, sequence, new.end);
        let first_block = plan.batch.block_table.len();
        plan.batch.block_table.extend_from_slice(&sequence.chain);
        plan.batch.sequences.push(BatchSequence {
            rows: first_row..first_row + rows,
            past,
            blocks: first_block..plan.batch.block_table.len(),
            adapter: sequence.adapter,
        });
        plan.members.push(key);
        if sequence.prefilling {
            plan.prefill_tokens += rows;
        }
        if let Some(scores) = &sequence.scores {
            let needed = scores.among(&new);
            add_scores(plan, key, needed, first_row, past);
        }
        if sequence.remaining() == 0 {
            let logits = plan.batch.logit_rows.len();
            let end = first_row + rows;
            plan.batch.logit_rows.extend(end - drafted - 1..end);
            plan.samples.push(SampleSlot {
                key,
                logits,
                drafted,
            });
            plan.prefill_ends |= sequence.prefilling;
            let last = *sequence
                .chain
                .last()
                .expect("rows were just stored in a block");
            let filled = self.blocks.filled(last);
            plan.logits_at.insert((last, filled), logits + drafted);
        }
    }

    /// Stores tokens `computed..end` in the tree: first in the open block, then in new ones.
    fn fill_blocks(&mut self, plan: &mut Plan, sequence: &mut Sequence, end: usize) {
        let block_tokens = self.blocks.block_tokens();
        while sequence.computed < end {
            let offset = sequence.computed % block_tokens;
            let piece = (block_tokens - offset).min(end - sequence.computed);
            let tokens = &sequence.tokens[sequence.computed..sequence.computed + piece];
            let last = sequence.chain.last().copied();
            let block = match last {
                Some(open) if offset > 0 => {
                    self.blocks.append(open, tokens);
                    open
                }
                _ => {
                    let parent = last.map_or(self.root(sequence.adapter), Parent::Block);
                    let block = self.blocks.allocate(parent, tokens);
                    let block = block.expect("blocks were freed before rows are added");
                    sequence.chain.push(block);
                    block
                }
            };
            plan.written.push(block);
            if sequence.prefilling {
                plan.prefilled.insert(block);
            }
            sequence.computed += piece;
        }
    }

    /// Starts waiting sequences, best first, as long as the next one has blocks.
    fn plan_waiting(&mut self, plan: &mut Plan, budget: &mut usize) {
        /// Bounds the work of a pass; more could not start in it anyway.
        const SCANNED_PER_SLOT: usize = 2;
        let scanned = SCANNED_PER_SLOT * self.config.max_num_seqs;
        let keys: Vec<OrderKey> = self.waiting.keys().take(scanned).copied().collect();
        let mut reserved: usize = self.running.values().map(|s| self.blocks_to_come(s)).sum();
        for key in keys {
            if self.running.len() >= self.config.max_num_seqs
                || (*budget == 0 && !plan.prefill_ends)
            {
                break;
            }
            let Some(mut sequence) = self.waiting.remove(&key) else {
                continue;
            };
            let twin = self.find_twin(&sequence, plan);
            let admission = match &twin {
                Some(twin) => self.admit_twin(&sequence, twin, reserved),
                None if *budget == 0 => Admission::Wait,
                None if sequence.scores.is_some() && plan.scores_left == 0 => Admission::Wait,
                None => self.admit(&sequence, plan, reserved),
            };
            match (admission, twin) {
                (Admission::Wait, _) => {
                    self.waiting.insert(key, sequence);
                    continue;
                }
                (Admission::NoBlocks, _) => {
                    self.waiting.insert(key, sequence);
                    break;
                }
                (Admission::Run(_), Some(twin)) => self.start_twin(plan, key, &mut sequence, twin),
                (Admission::Run(found), None) => {
                    self.start(plan, &mut sequence, found);
                    let rows = sequence.remaining().min(*budget);
                    let rows = sequence.rows_within(rows, plan.scores_left);
                    self.add_rows(plan, key, &mut sequence, rows, 0);
                    *budget -= rows;
                }
            }
            reserved += self.blocks_to_come(&sequence);
            self.running.insert(key, sequence);
        }
    }

    /// Blocks that a running sequence still needs for its known tokens and the next one.
    fn blocks_to_come(&self, sequence: &Sequence) -> usize {
        let all = self.blocks_for(sequence.tokens.len() + 1);
        all.saturating_sub(sequence.chain.len())
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.blocks.block_tokens())
    }

    /// Whether `needed` blocks can be allocated without preempting soon: running sequences keep the
    /// blocks of their known tokens, and some more to grow.
    fn has_blocks(&self, needed: usize, reserved: usize) -> bool {
        let growth = self.running.len().min(self.blocks.total() / 16);
        self.blocks.available() >= needed + reserved + growth
    }

    /// Decides whether a sequence can start: looks up its prefix in the prefix cache, and checks that there
    /// are enough free blocks for the remaining tokens and one more.
    fn admit(&self, sequence: &Sequence, plan: &Plan, reserved: usize) -> Admission {
        let known = &sequence.tokens[..sequence.cacheable()];
        let root = self.root(sequence.adapter);
        let mut found = self.blocks.find(root, known);
        if self.is_being_computed(root, known, &found, plan) {
            return Admission::Wait;
        }
        let used = found
            .full
            .iter()
            .filter(|&&b| self.blocks.is_used(b))
            .count();
        let needed = self.blocks_for(sequence.tokens.len() + 1) - used;
        // The source of a copy cannot be evicted in this pass.
        let pinned = found.tail.is_some_and(|(block, slots)| {
            !self.blocks.is_used(block) && slots < self.blocks.filled(block)
        });
        if self.has_blocks(needed + usize::from(pinned), reserved) {
            return Admission::Run(found);
        }
        found.tail = None;
        if self.running.is_empty() || (pinned && self.has_blocks(needed, reserved)) {
            return Admission::Run(found);
        }
        Admission::NoBlocks
    }

    /// Whether a prefill of this pass stores more of `known` below `root` than was found.
    fn is_being_computed(
        &self,
        root: Parent,
        known: &[TokenId],
        found: &PrefixMatch,
        plan: &Plan,
    ) -> bool {
        let rest = &known[found.full.len() * self.blocks.block_tokens()..];
        let parent = found.full.last();
        let parent = parent.map_or(root, |&b| Parent::Block(b));
        let stored = found.tail.map_or(0, |(_, slots)| slots);
        self.blocks
            .candidates(parent, rest)
            .any(|(block, shared, _)| shared > stored && plan.prefilled.contains(&block))
    }

    /// Assigns the found blocks to a sequence.
    fn start(&mut self, plan: &mut Plan, sequence: &mut Sequence, found: PrefixMatch) {
        let block_tokens = self.blocks.block_tokens();
        sequence.computed = found.tokens(block_tokens);
        self.note_cached(sequence, sequence.computed);
        for &block in &found.full {
            self.blocks.retain(block);
        }
        sequence.chain = found.full;
        let Some((block, slots)) = found.tail else {
            return;
        };
        let free = !self.blocks.is_used(block) && slots == self.blocks.filled(block);
        self.blocks.retain(block);
        if free {
            // No sequence writes to it and all of it fits: continue in place.
            sequence.chain.push(block);
            return;
        }
        plan.pins.push(block);
        let copied = sequence.computed - slots..sequence.computed;
        let to = self.allocate_copy(sequence, copied);
        sequence.chain.push(to);
        plan.written.push(to);
        plan.copies_before.push(BlockCopy {
            from: block,
            to,
            tokens: slots,
        });
    }

    /// Allocates the next block of a sequence, with these of its tokens.
    fn allocate_copy(&mut self, sequence: &Sequence, tokens: Range<usize>) -> BlockId {
        let parent = sequence.chain.last();
        let parent = parent.map_or(self.root(sequence.adapter), |&b| Parent::Block(b));
        let block = self.blocks.allocate(parent, &sequence.tokens[tokens]);
        block.expect("admission made sure of a block for the copy")
    }

    /// Counts the prompt tokens that were found stored, once per request.
    fn note_cached(&mut self, sequence: &mut Sequence, found: usize) {
        if sequence.cached_prompt.is_none() {
            let cached = found.min(sequence.prompt);
            sequence.cached_prompt = Some(cached);
            self.counters.cached_prompt_tokens += cached as u64;
        }
    }

    /// Looks for a sequence of this pass whose logits follow exactly the tokens of this one. One whose
    /// prompt is scored computes its own rows.
    fn find_twin(&self, sequence: &Sequence, plan: &Plan) -> Option<Twin> {
        if !plan.prefill_ends || sequence.scores.is_some() {
            return None;
        }
        let block_tokens = self.blocks.block_tokens();
        let mut full = Vec::new();
        let mut parent = self.root(sequence.adapter);
        let mut rest = &sequence.tokens[..];
        while rest.len() > block_tokens {
            let mut candidates = self.blocks.candidates(parent, rest);
            let (block, ..) = candidates.find(|&(_, shared, _)| shared == block_tokens)?;
            full.push(block);
            parent = Parent::Block(block);
            rest = &rest[block_tokens..];
        }
        let slots = rest.len();
        let mut candidates = self.blocks.candidates(parent, rest);
        candidates.find_map(|(last, shared, _)| {
            let logits = *plan.logits_at.get(&(last, slots))?;
            (shared == slots).then_some(Twin {
                full: full.clone(),
                last,
                slots,
                logits,
            })
        })
    }

    /// Whether a sequence can start on the work of its twin.
    fn admit_twin(&self, sequence: &Sequence, twin: &Twin, reserved: usize) -> Admission {
        let whole = twin.slots == self.blocks.block_tokens();
        let shared = twin.full.len() + usize::from(whole);
        let needed = self.blocks_for(sequence.tokens.len() + 1) - shared;
        if self.has_blocks(needed, reserved) {
            Admission::Run(PrefixMatch::default())
        } else {
            Admission::NoBlocks
        }
    }

    /// Starts a sequence on the rows of its twin: it draws from the same logits, and gets a copy of
    /// the last block, unless that is full.
    fn start_twin(&mut self, plan: &mut Plan, key: OrderKey, sequence: &mut Sequence, twin: Twin) {
        self.note_cached(sequence, sequence.prompt);
        for &block in twin.full.iter().chain([&twin.last]) {
            self.blocks.retain(block);
        }
        sequence.chain = twin.full;
        if twin.slots == self.blocks.block_tokens() {
            sequence.chain.push(twin.last);
        } else {
            plan.pins.push(twin.last);
            let end = sequence.tokens.len();
            let to = self.allocate_copy(sequence, end - twin.slots..end);
            sequence.chain.push(to);
            plan.written.push(to);
            plan.copies_after.push(BlockCopy {
                from: twin.last,
                to,
                tokens: twin.slots,
            });
        }
        sequence.computed = sequence.tokens.len();
        plan.members.push(key);
        plan.samples.push(SampleSlot {
            key,
            logits: twin.logits,
            drafted: 0,
        });
    }
}
