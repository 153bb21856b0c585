//! Packs rows into micro-batches in which every shared prefix is computed once.
//!
//! Rows are sorted by their tokens, so that rows with a common prefix (a system prompt, a group's
//! question, a common start of answers) stand together; the sorted list is cut where the least
//! sharing is lost, and each piece becomes a radix trie laid out parents first.
//!
//! Invariants: token `t` of a row is predicted by the trie row of its token `t − 1`; every token
//! with a weight is in exactly one term of exactly one micro-batch; a row is never split; only
//! tokens that some trained token depends on are computed; an item has the mask of its token, and
//! rows share it only where their masks are the same; for a model that replays the experts of its
//! sampler, rows share a token only where its experts are the same; the result depends on nothing but
//! the rows' contents and order.

mod targets;

pub use targets::{Target, TargetRow, pack_targets};

use sinew_tensor::attention::{LayoutError, Segment, TreeLayout};
use sinew_types::{EpisodeId, RouteSpan, RowMasks, TokenId, TrainRow, TrainRowError};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Range;

/// One log-probability to compute: of token `target`, predicted by trie row `row` at `temperature`.
#[derive(Clone, Copy, Debug)]
pub struct LossItem {
    /// Trie row of the token before the target.
    pub row: u32,
    /// Token whose log-probability is computed.
    pub target: TokenId,
    /// Temperature that divides the logits; finite, above 0.
    pub temperature: f32,
    /// Index in [`MicroBatch::masks`] of the allowed tokens, or [`RowMasks::ALL`].
    pub mask: u32,
}

impl Ord for LossItem {
    fn cmp(&self, other: &Self) -> Ordering {
        let place = |item: &Self| (item.row, item.target, item.mask);
        let temperatures = self.temperature.total_cmp(&other.temperature);
        place(self).cmp(&place(other)).then(temperatures)
    }
}

impl PartialOrd for LossItem {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for LossItem {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for LossItem {}

/// One trained token of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// Index in the row's columns, or in [`TargetRow::targets`].
    pub t: u32,
    /// Index in [`MicroBatch::items`]; rows with a common prefix sampled at one temperature share items.
    pub item: u32,
}

/// A row inside a micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedRow {
    /// Index in the rows given to [`pack`] or [`pack_targets`].
    pub row: usize,
    /// The trained tokens, in order.
    pub terms: Vec<Term>,
    /// Indices in [`MicroBatch::items`] of the teacher's top tokens, term after term, as many for
    /// each as its row's `teacher_top` has.
    pub tops: Vec<u32>,
    /// Segments of the layout that contain the row's computed tokens, root first.
    pub segments: Vec<u32>,
}

/// The input of one forward and backward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    /// Tree of the trie rows, with their positions.
    pub layout: TreeLayout,
    /// Token of each trie row, `[layout.rows()]`.
    pub tokens: Vec<TokenId>,
    /// Log-probabilities to compute, sorted and without duplicates.
    pub items: Vec<LossItem>,
    /// The masks that items refer to.
    pub masks: MaskTable,
    /// The experts to use for each trie row, if the model replays them.
    pub routes: RouteTable,
    /// Trie rows of all micro-batches of its packing.
    pub packed_tokens: usize,
    /// The rows, with the indices of their trained tokens.
    pub rows: Vec<PackedRow>,
}

/// The masks of a micro-batch's items, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MaskTable {
    /// Words of a bit set; 0 where no item has one.
    pub words: usize,
    /// Bit sets as in [`RowMasks::table`].
    pub table: Vec<u32>,
}

/// The experts of a micro-batch's trie rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteTable {
    /// Decoder layers; 0 where no row has any.
    pub layers: usize,
    /// Number of experts of a token in a layer.
    pub top_k: usize,
    /// Numbers of experts, `[trie rows][layers][top_k]`; those of a row are [`RouteTable::FREE`] if its
    /// routers choose. Empty if no row has any.
    pub experts: Vec<u16>,
    /// Number of trie rows whose experts are given.
    pub known: usize,
}

impl RouteTable {
    /// Entry without an expert.
    pub const FREE: u16 = u16::MAX;
}

/// The micro-batches of one optimizer step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    pub micro_batches: Vec<MicroBatch>,
    /// Trie rows in all micro-batches.
    pub computed_tokens: usize,
    /// Number of tokens of all rows, the work of a trainer without prefix sharing. Divided by
    /// `computed_tokens`, it is the saving.
    pub naive_tokens: usize,
    /// Rows without a trained token; they are in no micro-batch.
    pub untrained_rows: usize,
    /// Trie rows whose experts are given, in all micro-batches.
    pub routed_tokens: usize,
}

/// Reasons for which rows cannot be packed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PackError {
    /// A row that contradicts itself.
    #[error(transparent)]
    Row(#[from] TrainRowError),
    /// A row that does not fit an empty micro-batch.
    #[error(
        "row of episode {episode} needs {tokens} packed tokens, a micro-batch holds {max_tokens}: \
         raise the micro-batch size or shorten episodes, a row is never split"
    )]
    RowTooLong {
        episode: EpisodeId,
        tokens: usize,
        max_tokens: usize,
    },
    /// Masks are for vocabularies of different sizes.
    #[error(
        "row of episode {episode} has masks of {words} words, rows before it of {expected}: they are of one vocabulary"
    )]
    MaskWords {
        episode: EpisodeId,
        words: u32,
        expected: usize,
    },
    /// Experts are of models of different shapes.
    #[error(
        "row of episode {episode} has experts of {layers} layers x {top_k}, rows before it of {} x {}: they are \
         of one model",
        .expected.0,
        .expected.1
    )]
    RouteShape {
        episode: EpisodeId,
        layers: u16,
        top_k: u16,
        expected: (u16, u16),
    },
    /// A row with targets that does not fit an empty micro-batch.
    #[error(
        "row {row} needs {tokens} packed tokens, a micro-batch holds {max_tokens}: raise the micro-batch \
         size or shorten the row, a row is never split"
    )]
    TargetRowTooLong {
        row: usize,
        tokens: usize,
        max_tokens: usize,
    },
    /// A target after a token that the row does not have, or before the target that precedes it.
    #[error(
        "row {row}: target {index} is after token {after} of {tokens}: targets are in the order of their places"
    )]
    TargetPlace {
        row: usize,
        index: usize,
        after: u32,
        tokens: usize,
    },
    /// There are more rows than a layout supports.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// The part of a row that has to be computed: all tokens before the last trained one.
struct RowPart<'a> {
    row: usize,
    tokens: &'a [TokenId],
    /// Bytes of the experts of each token, none where its routers choose; empty if all choose.
    routes: Vec<&'a [u8]>,
    /// Layers, and experts of each, of `routes`.
    route_shape: (usize, usize),
    /// Length of the prefix shared with the previous row in sorted order.
    shared: usize,
}

impl RowPart<'_> {
    fn route(&self, t: usize) -> &[u8] {
        self.routes.get(t).copied().unwrap_or_default()
    }

    /// Number of leading tokens that both rows compute alike.
    fn common(&self, other: &Self) -> usize {
        let pairs = self.tokens.iter().zip(other.tokens).enumerate();
        let alike = pairs.take_while(|&(t, (a, b))| a == b && self.route(t) == other.route(t));
        alike.count()
    }

    /// Order in which rows with a common prefix stand together.
    fn order(&self, other: &Self) -> Ordering {
        if self.routes.is_empty() && other.routes.is_empty() {
            return self.tokens.cmp(other.tokens);
        }
        let at = self.common(other);
        let next = |part: &Self| part.tokens.get(at).copied();
        let tokens = next(self).cmp(&next(other));
        tokens.then_with(|| self.route(at).cmp(other.route(at)))
    }
}

/// Packs `rows` into micro-batches of at most `max_tokens` trie rows, for a model whose routers choose.
///
/// Takes `O(rows²)` comparisons of sizes at worst for the cuts, which is small next to the passes
/// themselves.
///
/// # Errors
/// If a row is invalid or longer than `max_tokens`; nothing is dropped silently.
pub fn pack(rows: &[TrainRow], max_tokens: usize) -> Result<Packing, PackError> {
    pack_rows(rows, max_tokens, false, true)
}

/// Packs `rows` like [`pack`], for a model that computes each row by itself: no prefix is shared.
///
/// # Errors
/// Same as [`pack`].
pub fn pack_flat(rows: &[TrainRow], max_tokens: usize) -> Result<Packing, PackError> {
    pack_rows(rows, max_tokens, false, false)
}

/// Packs `rows` like [`pack`], or [`pack_flat`] unless the model `shares` prefixes, for a model that uses the
/// experts of [`TrainRow::routes`].
///
/// # Errors
/// Same as [`pack`], and if experts are of models of different shapes.
pub fn pack_routed(
    rows: &[TrainRow],
    max_tokens: usize,
    shares: bool,
) -> Result<Packing, PackError> {
    pack_rows(rows, max_tokens, true, shares)
}

fn pack_rows(
    rows: &[TrainRow],
    max_tokens: usize,
    routed: bool,
    shares: bool,
) -> Result<Packing, PackError> {
    let sorted = sorted_rows(rows, max_tokens, routed, shares)?;
    let lens = rows.iter().map(|row| row.tokens.len());
    packing(&sorted, max_tokens, lens, |piece| {
        let masks = collect_masks(rows, piece)?;
        let asked = piece.iter().map(|part| asked_by(&rows[part.row], &masks));
        micro_batch(piece, masks.table(), asked.collect())
    })
}

/// Cuts the sorted rows into pieces, of which `batch` makes micro-batches. `lens` are the tokens of all rows.
fn packing(
    sorted: &[RowPart<'_>],
    max_tokens: usize,
    lens: impl ExactSizeIterator<Item = usize>,
    batch: impl Fn(&[RowPart<'_>]) -> Result<MicroBatch, PackError>,
) -> Result<Packing, PackError> {
    let pieces = cut(sorted, max_tokens).into_iter();
    let mut micro_batches = pieces
        .map(|piece| batch(&sorted[piece]))
        .collect::<Result<Vec<_>, _>>()?;
    let computed_tokens = micro_batches.iter().map(|m| m.tokens.len()).sum();
    for batch in &mut micro_batches {
        batch.packed_tokens = computed_tokens;
    }
    Ok(Packing {
        computed_tokens,
        routed_tokens: micro_batches.iter().map(|m| m.routes.known).sum(),
        untrained_rows: lens.len() - sorted.len(),
        naive_tokens: lens.sum(),
        micro_batches,
    })
}

fn sorted_rows(
    rows: &[TrainRow],
    max_tokens: usize,
    routed: bool,
    shares: bool,
) -> Result<Vec<RowPart<'_>>, PackError> {
    let mut sorted: Vec<RowPart<'_>> = Vec::with_capacity(rows.len());
    let mut shape = None;
    for (index, row) in rows.iter().enumerate() {
        row.validate()?;
        let Some(last) = row.weights.iter().rposition(|&w| w != 0.0) else {
            continue;
        };
        if last > max_tokens {
            return Err(PackError::RowTooLong {
                episode: row.episode.clone(),
                tokens: last,
                max_tokens,
            });
        }
        let spans = if routed { &row.routes[..] } else { &[] };
        if let Some(span) = spans.first() {
            let expected = *shape.get_or_insert((span.layers, span.top_k));
            if expected != (span.layers, span.top_k) {
                return Err(PackError::RouteShape {
                    episode: row.episode.clone(),
                    layers: span.layers,
                    top_k: span.top_k,
                    expected,
                });
            }
        }
        sorted.push(RowPart {
            row: index,
            tokens: &row.tokens[..last],
            routes: routes(spans, last),
            route_shape: shape.map_or((0, 0), |(layers, k)| (usize::from(layers), usize::from(k))),
            shared: 0,
        });
    }
    sort(&mut sorted, shares);
    Ok(sorted)
}

/// The experts of the first `count` tokens of a row, as in [`RowPart::routes`].
fn routes(spans: &[RouteSpan], count: usize) -> Vec<&[u8]> {
    if spans.is_empty() {
        return Vec::new();
    }
    let none: &[u8] = &[];
    let mut each = vec![none; count];
    for span in spans {
        let places = span.start as usize..count.min(span.end() as usize);
        for (position, route) in each
            .iter_mut()
            .enumerate()
            .take(places.end)
            .skip(places.start)
        {
            *route = span.at(position).unwrap_or_default();
        }
    }
    each
}

/// Sorts rows by what they compute; if they are to share prefixes, finds the one of each with the row before.
fn sort(parts: &mut [RowPart<'_>], shares: bool) {
    parts.sort_by(|a, b| a.order(b).then(a.row.cmp(&b.row)));
    let with_shared = if shares { parts.len() } else { 0 };
    for i in 1..with_shared {
        parts[i].shared = parts[i - 1].common(&parts[i]);
    }
}

/// Cuts the sorted rows into pieces of at most `max_tokens` trie rows with the least total, and
/// among those into the fewest pieces.
///
/// A piece's trie has `len` rows for its first sequence and `len − shared` for each other one, so
/// a cut costs exactly the prefix it separates: cuts fall between groups rather than inside them.
fn cut(sorted: &[RowPart<'_>], max_tokens: usize) -> Vec<Range<usize>> {
    // best[end]: (computed tokens, pieces, start of the last piece) of the first `end` rows.
    let mut best = vec![(0usize, 0usize, 0usize)];
    for end in 1..=sorted.len() {
        let mut choice = (usize::MAX, usize::MAX, 0);
        let mut without_first = 0;
        for start in (0..end).rev() {
            let size = sorted[start].tokens.len() + without_first;
            without_first += sorted[start].tokens.len() - sorted[start].shared;
            // Sizes only grow towards smaller starts.
            if size > max_tokens {
                break;
            }
            let (total, pieces, _) = best[start];
            choice = choice.min((total + size, pieces + 1, start));
        }
        best.push(choice);
    }
    let mut pieces = Vec::new();
    let mut end = sorted.len();
    while end > 0 {
        let start = best[end].2;
        pieces.push(start..end);
        end = start;
    }
    pieces.reverse();
    pieces
}

/// Rows of `piece` that share their first `depth` tokens and still have to be laid out.
struct Branch {
    rows: Range<usize>,
    depth: usize,
    parent: Option<u32>,
}

/// A log-probability that a row asks for, before the place of its tokens in the trie is known.
struct Asked {
    /// Index in the row's columns or targets.
    t: u32,
    /// Index of the row's last token that the target follows.
    after: u32,
    /// The item, whose trie row is not set.
    item: LossItem,
    /// Other targets in the same place.
    tops: Vec<TokenId>,
}

/// Builds the micro-batch of some sorted rows, from the log-probabilities that each asks for, in the order of
/// their places.
fn micro_batch(
    piece: &[RowPart<'_>],
    masks: MaskTable,
    asked: Vec<Vec<Asked>>,
) -> Result<MicroBatch, PackError> {
    let mut segments: Vec<Segment> = Vec::new();
    let mut tokens: Vec<TokenId> = Vec::new();
    let mut experts: Vec<&[u8]> = Vec::new();
    let mut paths: Vec<Vec<u32>> = vec![Vec::new(); piece.len()];
    let mut open = Vec::new();
    push_branches(&mut open, piece, 0..piece.len(), 0, None);
    while let Some(branch) = open.pop() {
        let first = &piece[branch.rows.start];
        let inner = &piece[branch.rows.start + 1..branch.rows.end];
        let shared = inner.iter().map(|n| n.shared).min();
        let end = shared.unwrap_or(first.tokens.len());
        let index = segments.len() as u32;
        segments.push(Segment {
            start: tokens.len() as u32,
            len: (end - branch.depth) as u32,
            position: branch.depth as u32,
            parent: branch.parent,
        });
        tokens.extend_from_slice(&first.tokens[branch.depth..end]);
        experts.extend((branch.depth..end).map(|t| first.route(t)));
        paths[branch.rows.clone()]
            .iter_mut()
            .for_each(|p| p.push(index));
        push_branches(&mut open, piece, branch.rows, end, Some(index));
    }
    let layout = TreeLayout::new(segments)?;
    let (items, rows) = loss_items(piece, asked, &layout, paths);
    Ok(MicroBatch {
        layout,
        tokens,
        items,
        masks,
        routes: route_table(piece, &experts),
        packed_tokens: 0,
        rows,
    })
}

/// The experts of trie rows, given as in [`RowPart::routes`].
fn route_table(piece: &[RowPart<'_>], rows: &[&[u8]]) -> RouteTable {
    let Some(routed) = piece.iter().find(|part| !part.routes.is_empty()) else {
        return RouteTable::default();
    };
    let (layers, top_k) = routed.route_shape;
    let mut experts = Vec::with_capacity(rows.len() * layers * top_k);
    for bytes in rows {
        let wide = bytes.len() > layers * top_k;
        if bytes.is_empty() {
            experts.resize(experts.len() + layers * top_k, RouteTable::FREE);
        } else {
            experts.extend(RouteSpan::numbers(bytes, wide));
        }
    }
    RouteTable {
        layers,
        top_k,
        experts,
        known: rows.iter().filter(|bytes| !bytes.is_empty()).count(),
    }
}

/// Splits `rows`, which share `depth` tokens, by their next token; rows that end here need no more.
/// The stack pops them in sorted order.
fn push_branches(
    open: &mut Vec<Branch>,
    piece: &[RowPart<'_>],
    rows: Range<usize>,
    depth: usize,
    parent: Option<u32>,
) {
    let mut end = rows.end;
    for start in rows.clone().rev() {
        let splits = start == rows.start || piece[start].shared == depth;
        if !splits {
            continue;
        }
        if piece[start].tokens.len() > depth {
            open.push(Branch {
                rows: start..end,
                depth,
                parent,
            });
        }
        end = start;
    }
}

/// The masks of some rows' trained tokens, numbered by their contents.
#[derive(Debug, Default)]
struct CollectedMasks<'a> {
    words: usize,
    index: BTreeMap<&'a [u32], u32>,
}

impl CollectedMasks<'_> {
    /// Returns the number of token `t`'s mask.
    fn of(&self, row: &TrainRow, t: usize) -> u32 {
        let mask = row.masks.as_ref().and_then(|masks| masks.mask(t));
        mask.and_then(|mask| self.index.get(mask).copied())
            .unwrap_or(RowMasks::ALL)
    }

    fn table(&self) -> MaskTable {
        MaskTable {
            words: self.words,
            table: self.index.keys().copied().flatten().copied().collect(),
        }
    }
}

fn collect_masks<'a>(
    all: &'a [TrainRow],
    piece: &[RowPart<'_>],
) -> Result<CollectedMasks<'a>, PackError> {
    let mut collected = CollectedMasks::default();
    for needed in piece {
        let row = &all[needed.row];
        let Some(masks) = &row.masks else { continue };
        let trained = (1..row.tokens.len()).filter(|&t| row.weights[t] != 0.0);
        for mask in trained.filter_map(|t| masks.mask(t)) {
            if collected.words == 0 {
                collected.words = mask.len();
            }
            if mask.len() != collected.words {
                return Err(PackError::MaskWords {
                    episode: row.episode.clone(),
                    words: masks.words_per_mask,
                    expected: collected.words,
                });
            }
            collected.index.insert(mask, 0);
        }
    }
    for (number, slot) in collected.index.values_mut().enumerate() {
        *slot = number as u32;
    }
    Ok(collected)
}

/// The log-probabilities that a row asks for: those of its trained tokens, and of a teacher's in their
/// places.
fn asked_by(row: &TrainRow, masks: &CollectedMasks<'_>) -> Vec<Asked> {
    let trained = (1..row.tokens.len()).filter(|&t| row.weights[t] != 0.0);
    let ask = |t: usize| Asked {
        t: t as u32,
        after: t as u32 - 1,
        item: LossItem {
            row: 0,
            target: row.tokens[t],
            temperature: row.temperature(t),
            mask: masks.of(row, t),
        },
        tops: row
            .teacher_top
            .as_ref()
            .map_or_else(Vec::new, |top| top[t].iter().map(|top| top.id).collect()),
    };
    trained.map(ask).collect()
}

/// Builds the items of a micro-batch and the terms of each row.
fn loss_items(
    piece: &[RowPart<'_>],
    asked: Vec<Vec<Asked>>,
    layout: &TreeLayout,
    paths: Vec<Vec<u32>>,
) -> (Vec<LossItem>, Vec<PackedRow>) {
    let mut index_of = BTreeMap::new();
    let mut items_of = Vec::with_capacity(piece.len());
    for (asked, path) in asked.into_iter().zip(&paths) {
        let mut path = path.iter().map(|&s| &layout.segments()[s as usize]);
        let mut at = path.next();
        let (mut items, mut tops) = (Vec::new(), Vec::new());
        for ask in asked {
            while at.is_some_and(|s| s.position + s.len <= ask.after) {
                at = path.next();
            }
            let Some(segment) = at else { break };
            let item = LossItem {
                row: segment.start + ask.after - segment.position,
                ..ask.item
            };
            index_of.insert(item, 0u32);
            items.push((ask.t, item));
            for target in ask.tops {
                let item = LossItem { target, ..item };
                index_of.insert(item, 0u32);
                tops.push(item);
            }
        }
        items_of.push((items, tops));
    }
    for (index, slot) in index_of.values_mut().enumerate() {
        *slot = index as u32;
    }
    let rows = piece
        .iter()
        .zip(paths)
        .zip(items_of)
        .map(|((needed, segments), (items, tops))| PackedRow {
            row: needed.row,
            tops: tops.iter().map(|item| index_of[item]).collect(),
            terms: items
                .into_iter()
                .map(|(t, item)| Term {
                    t,
                    item: index_of[&item],
                })
                .collect(),
            segments,
        })
        .collect();
    (index_of.into_keys().collect(), rows)
}

#[cfg(test)]
mod tests;
