//! The plan of a layout: the strips and tasks of its rows, and the keys that each strip reads.
//!
//! A *strip* is a few rows (with the query heads that share a key head: the lanes of the kernels). A *chunk*
//! is a run of strips that one task handles; it numbers the rows whose keys it needs, so that they are copied
//! next to each other once. Strips can span segments: keys that only some of the rows see carry a mask.
//!
//! The plan depends on the layout, the group size and the vector width, never on threads. It costs
//! time linear in the number of segments times their depth, and is kept for all layers.

use super::layout::{Segment, TreeLayout};

/// Maximum vectors of a strip: with 8 keys or values at a time they fill the registers.
pub(super) const STRIP_VECTORS: usize = 3;
/// Maximum lanes of a strip.
pub(super) const MAX_LANES: usize = 16 * STRIP_VECTORS;
/// Keys that a kernel handles at once; their scores stay in the first cache level.
pub(super) const BLOCK_KEYS: usize = 64;
/// Maximum unseen keys that a block includes to bridge the gap between seen ones: cheaper than a
/// new block.
const BRIDGE_KEYS: usize = 16;
/// Cost of a strip in addition to its keys, in keys: loading and storing its rows.
const STRIP_COST: usize = 32;
/// Chunks of a layout times head groups: enough to balance the load of some threads.
const TASKS: usize = 48;

/// Parameters of a plan in addition to the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlanKey {
    /// Query heads in a strip.
    pub(super) heads: usize,
    /// Lanes of a vector.
    pub(super) lanes: usize,
    /// Tasks that run each chunk, one for every group of heads.
    pub(super) groups: usize,
}

impl PlanKey {
    /// Maximum rows of a strip.
    fn strip_rows(&self) -> usize {
        STRIP_VECTORS * self.lanes / self.heads
    }

    /// Returns the number of vectors that `rows` rows fill.
    fn vectors(&self, rows: usize) -> usize {
        (rows * self.heads).div_ceil(self.lanes)
    }
}

/// All chunks of a layout, with the layout and the parameters that they were made for.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) chunks: Vec<Chunk>,
    pub(super) key: PlanKey,
    segments: Vec<Segment>,
}

/// Consecutive local rows that are consecutive rows of the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LocalRun {
    pub(super) row: usize,
    pub(super) local: usize,
    pub(super) len: usize,
}

/// The work of one task.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    /// Rows whose keys the chunk reads, in local order.
    pub(super) runs: Vec<LocalRun>,
    /// Number of local rows.
    pub(super) locals: usize,
    pub(super) strips: Vec<Strip>,
}

/// Rows that go through their keys together.
#[derive(Debug, Default)]
pub(super) struct Strip {
    /// Rows of the layout whose queries the strip holds.
    pub(super) rows: Vec<u32>,
    /// The keys that they read, in ascending local order.
    pub(super) blocks: Vec<KeyBlock>,
    /// Masks of the blocks in which not every row sees every key.
    pub(super) spans: Vec<Span>,
}

/// A block of up to [`BLOCK_KEYS`] consecutive local keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KeyBlock {
    pub(super) local: usize,
    pub(super) len: usize,
    /// Spans of the block in [`Strip::spans`]; empty if every row of the strip sees every key.
    pub(super) spans: std::ops::Range<usize>,
}

/// Consecutive keys of a block that the same rows of the strip see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) len: usize,
    /// Bit `i` for row `i` of the strip.
    pub(super) seen_by: u64,
}

/// A segment that some rows of a strip see.
struct SeenSegment {
    segment: usize,
    /// Rows that see the whole segment.
    by: u64,
    /// Rows that lie in it, and the first one's place in the strip.
    own: Option<(Part, usize)>,
}

/// Rows of one segment in a strip.
#[derive(Clone, Copy)]
struct Part {
    segment: usize,
    offset: usize,
    len: usize,
}

impl Plan {
    pub(super) fn new(layout: &TreeLayout, key: PlanKey) -> Self {
        let forest = Forest::new(layout.segments());
        let strips = forest.cut_strips(&key);
        let total: usize = strips.iter().map(|s| s.cost).sum();
        let target = total.div_ceil(TASKS.div_ceil(key.groups)).max(1);
        let mut chunks = Vec::new();
        let (mut first, mut cost) = (0, 0);
        for (i, strip) in strips.iter().enumerate() {
            cost += strip.cost;
            if cost >= target || i + 1 == strips.len() {
                chunks.push(forest.chunk(&strips[first..=i]));
                (first, cost) = (i + 1, 0);
            }
        }
        Self {
            chunks,
            key,
            segments: layout.segments().to_vec(),
        }
    }

    /// Whether this is the plan of such a layout.
    pub(super) fn fits(&self, layout: &TreeLayout, key: PlanKey) -> bool {
        self.key == key && self.segments == layout.segments()
    }
}

/// Segments in depth-first order, so that neighbours share ancestors.
struct Forest<'a> {
    segments: &'a [Segment],
    order: Vec<usize>,
    rank: Vec<usize>,
}

/// A strip before its chunk numbers the keys.
struct Draft {
    parts: Vec<Part>,
    cost: usize,
}

impl<'a> Forest<'a> {
    fn new(segments: &'a [Segment]) -> Self {
        let mut children = vec![Vec::new(); segments.len()];
        let mut pending = Vec::new();
        for (i, segment) in segments.iter().enumerate().rev() {
            match segment.parent {
                Some(parent) => children[parent as usize].push(i),
                None => pending.push(i),
            }
        }
        let mut order = Vec::with_capacity(segments.len());
        while let Some(i) = pending.pop() {
            order.push(i);
            pending.append(&mut children[i]);
        }
        let mut rank = vec![0; segments.len()];
        for (r, &i) in order.iter().enumerate() {
            rank[i] = r;
        }
        Self {
            segments,
            order,
            rank,
        }
    }

    /// The parent of a segment, its parent, and so on.
    fn ancestors(&self, segment: usize) -> impl Iterator<Item = usize> {
        let parent = |i: usize| self.segments[i].parent.map(|p| p as usize);
        std::iter::successors(parent(segment), move |&i| parent(i))
    }

    /// Fills strips in depth-first order; a strip continues into the next segment if that costs less than a
    /// separate strip.
    fn cut_strips(&self, key: &PlanKey) -> Vec<Draft> {
        let cost = |rows: usize, keys: usize| key.vectors(rows) * (keys + STRIP_COST);
        let mut strips: Vec<Draft> = Vec::new();
        // Number of the strip that last counted a segment's keys, from 1.
        let mut counted = vec![0; self.segments.len()];
        let (mut rows, mut keys) = (0, 0);
        for &segment in &self.order {
            let Segment { len, position, .. } = self.segments[segment];
            let (len, past) = (len as usize, position as usize);
            let mut offset = 0;
            while offset < len {
                let take = (key.strip_rows() - rows).min(len - offset);
                let current = strips.len();
                let fresh = |s: &usize| counted[*s] != current;
                let new_keys: usize = take
                    + self
                        .ancestors(segment)
                        .filter(fresh)
                        .map(|s| self.segments[s].len as usize)
                        .sum::<usize>();
                let joined = cost(rows + take, keys + new_keys);
                let fits = rows > 0 && take > 0 && offset == 0;
                let apart = cost(rows, keys) + cost(take, past + take);
                if fits && joined <= apart {
                    keys += new_keys;
                } else {
                    strips.push(Draft {
                        parts: Vec::new(),
                        cost: 0,
                    });
                    rows = 0;
                    keys = 0;
                }
                let take = (key.strip_rows() - rows).min(len - offset);
                if rows == 0 {
                    keys = past + offset + take;
                }
                let number = strips.len();
                for s in self.ancestors(segment) {
                    counted[s] = number;
                }
                counted[segment] = number;
                rows += take;
                if let Some(strip) = strips.last_mut() {
                    strip.parts.push(Part {
                        segment,
                        offset,
                        len: take,
                    });
                    strip.cost = cost(rows, keys);
                }
                offset += take;
            }
        }
        strips
    }

    /// The chunk of some strips: numbers the rows whose keys they need.
    fn chunk(&self, drafts: &[Draft]) -> Chunk {
        // Rows of each segment, from its start, whose keys are needed.
        let mut needed = vec![0usize; self.segments.len()];
        for part in drafts.iter().flat_map(|d| &d.parts) {
            needed[part.segment] = needed[part.segment].max(part.offset + part.len);
            for ancestor in self.ancestors(part.segment) {
                needed[ancestor] = self.segments[ancestor].len as usize;
            }
        }
        let mut chunk = Chunk::default();
        let mut local = vec![0usize; self.segments.len()];
        for &segment in self.order.iter().filter(|&&s| needed[s] > 0) {
            local[segment] = chunk.locals;
            let row = self.segments[segment].start as usize;
            let run = LocalRun {
                row,
                local: chunk.locals,
                len: needed[segment],
            };
            match chunk.runs.last_mut() {
                Some(last) if last.row + last.len == row => last.len += run.len,
                _ => chunk.runs.push(run),
            }
            chunk.locals += needed[segment];
        }
        let mut entry_of = vec![usize::MAX; self.segments.len()];
        chunk.strips = drafts
            .iter()
            .map(|d| self.strip(d, &local, &mut entry_of))
            .collect();
        chunk
    }

    /// `entry_of` holds `usize::MAX` for each segment, before and after.
    fn strip(&self, draft: &Draft, local: &[usize], entry_of: &mut [usize]) -> Strip {
        let mut strip = Strip::default();
        let mut seen: Vec<SeenSegment> = Vec::new();
        let mut note = |segment: usize, by: u64, own: Option<(Part, usize)>| {
            if entry_of[segment] == usize::MAX {
                entry_of[segment] = seen.len();
                seen.push(SeenSegment { segment, by, own });
            } else {
                let entry = &mut seen[entry_of[segment]];
                entry.by |= by;
                entry.own = entry.own.or(own);
            }
        };
        for part in &draft.parts {
            let first = strip.rows.len();
            note(part.segment, 0, Some((*part, first)));
            for ancestor in self.ancestors(part.segment) {
                note(ancestor, part.mask(first), None);
            }
            let start = self.segments[part.segment].start as usize + part.offset;
            let rows = start..start + part.len;
            strip.rows.extend(rows.map(|row| row as u32));
        }
        seen.iter().for_each(|s| entry_of[s.segment] = usize::MAX);
        seen.sort_unstable_by_key(|s| self.rank[s.segment]);
        let mut pieces = Vec::new();
        for entry in &seen {
            let len = self.segments[entry.segment].len as usize;
            entry.add_pieces(local[entry.segment], len, &mut pieces);
        }
        strip.fill_blocks(&pieces);
        strip
    }
}

impl Part {
    /// Bits of its rows in a strip in which the first has place `first`.
    fn mask(&self, first: usize) -> u64 {
        ((1u64 << self.len) - 1) << first
    }
}

/// Consecutive local keys that the same rows of a strip see.
struct Piece {
    local: usize,
    len: usize,
    seen_by: u64,
}

impl SeenSegment {
    /// Appends the keys of the segment, which has `len` rows from `local` on, in ascending order.
    fn add_pieces(&self, local: usize, len: usize, pieces: &mut Vec<Piece>) {
        let mut push = |offset: usize, len: usize, seen_by: u64| {
            pieces.push(Piece {
                local: local + offset,
                len,
                seen_by,
            });
        };
        let Some((part, first)) = self.own else {
            return push(0, len, self.by);
        };
        let rows = part.mask(first);
        if part.offset > 0 {
            push(0, part.offset, self.by | rows);
        }
        for i in 0..part.len {
            let from_here_on = rows & (u64::MAX << (first + i));
            push(part.offset + i, 1, self.by | from_here_on);
        }
    }
}

impl Strip {
    /// Cuts pieces in ascending order into blocks.
    fn fill_blocks(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            let (mut local, mut len) = (piece.local, piece.len);
            while len > 0 {
                let end = self.blocks.last().map_or(0, |b| b.local + b.len);
                let used = self.blocks.last().map_or(BLOCK_KEYS, |b| b.len);
                let gap = local - end;
                if used + gap >= BLOCK_KEYS || gap > BRIDGE_KEYS {
                    let spans = self.spans.len()..self.spans.len();
                    self.blocks.push(KeyBlock {
                        local,
                        len: 0,
                        spans,
                    });
                } else if gap > 0 {
                    self.push_span(gap, 0);
                }
                let used = self.blocks.last().map_or(0, |b| b.len);
                let take = len.min(BLOCK_KEYS - used);
                self.push_span(take, piece.seen_by);
                local += take;
                len -= take;
            }
        }
        let all = (1u64 << self.rows.len()) - 1;
        for block in &mut self.blocks {
            if self.spans[block.spans.clone()]
                .iter()
                .all(|s| s.seen_by == all)
            {
                block.spans = 0..0;
            }
        }
    }

    fn push_span(&mut self, len: usize, seen_by: u64) {
        let Some(block) = self.blocks.last_mut() else {
            return;
        };
        block.len += len;
        match self.spans.last_mut() {
            Some(last) if last.seen_by == seen_by && !block.spans.is_empty() => last.len += len,
            _ => {
                self.spans.push(Span { len, seen_by });
                block.spans.end = self.spans.len();
            }
        }
    }
}
