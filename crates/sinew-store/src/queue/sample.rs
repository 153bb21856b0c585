//! Selects the ready rows of a sample.

use super::core::{Hold, QueueCore, Row};
use super::rows::{Order, Sample};
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Returns the rows of a sample with their part, sorted by part, then in the order of selection.
pub(super) fn choose(core: &QueueCore, reader: usize, sample: &Sample) -> Vec<(u64, usize)> {
    let mut taken = Vec::new();
    let mut room = Room {
        rows: sample.rows,
        bytes: sample.bytes,
        tokens: sample.tokens,
    };
    let ready = core.readers[reader].ready.iter().map(|(_, seq)| *seq);
    match sample.order {
        Order::Oldest => take(core, reader, sample, ready, &mut room, &mut taken),
        Order::Freshest => {
            let mut ready: Vec<u64> = ready.collect();
            ready.sort_by_key(|seq| {
                let row = &core.rows[seq];
                (Reverse(row.priority), Reverse(row.version), *seq)
            });
            take(
                core,
                reader,
                sample,
                ready.into_iter(),
                &mut room,
                &mut taken,
            );
        }
    }
    deal(core, &taken, sample.parts)
}

/// Remaining limits of a sample.
struct Room {
    rows: usize,
    bytes: u64,
    tokens: u64,
}

impl Room {
    /// Subtracts from the limits, if enough is left.
    fn spend(&mut self, rows: usize, bytes: u64, tokens: u64) -> bool {
        let fits = rows <= self.rows && bytes <= self.bytes && tokens <= self.tokens;
        if fits {
            self.rows -= rows;
            self.bytes -= bytes;
            self.tokens -= tokens;
        }
        fits
    }
}

/// Takes rows or complete groups in order until one does not fit. The first one is taken even if it exceeds
/// the limits on bytes or tokens, so that every row can be delivered. A group with more rows than the limit
/// is skipped.
fn take(
    core: &QueueCore,
    reader: usize,
    sample: &Sample,
    ready: impl Iterator<Item = u64>,
    room: &mut Room,
    taken: &mut Vec<u64>,
) {
    let mut seen = BTreeSet::new();
    for seq in ready {
        let row = &core.rows[&seq];
        let unit = if sample.whole_groups {
            if !seen.insert(row.unit) {
                continue;
            }
            match group(core, reader, sample, row) {
                Some(rows) if rows.len() <= sample.rows => rows,
                _ => continue,
            }
        } else if row.version < sample.from_version {
            continue;
        } else {
            vec![seq]
        };
        let sum = |of: fn(&Row) -> u64| {
            let each = unit.iter().map(|seq| of(&core.rows[seq]));
            each.fold(0, u64::saturating_add)
        };
        let (bytes, tokens) = (sum(|r| r.bytes), sum(|r| r.tokens));
        let first = taken.is_empty();
        if !room.spend(unit.len(), bytes, tokens) {
            if !first {
                return;
            }
            taken.extend(unit);
            return;
        }
        taken.extend(unit);
    }
}

/// Returns the rows of a group if it can be delivered as a whole: all were put, and each is ready or already
/// acked.
fn group(core: &QueueCore, reader: usize, sample: &Sample, row: &Row) -> Option<Vec<u64>> {
    let group = core.groups.get(&row.unit).filter(|g| g.whole())?;
    let mut rows = Vec::with_capacity(group.live.len());
    for &seq in &group.live {
        let row = &core.rows[&seq];
        match core.claim(row, reader).hold {
            Hold::Acked => {}
            Hold::Open
                if core.readers[reader].wants(row.fields) && row.version >= sample.from_version =>
            {
                rows.push(seq);
            }
            _ => return None,
        }
    }
    Some(rows)
}

/// Divides rows into parts: the longest first, each to the part with the fewest tokens so far (Graham,
/// "Bounds on multiprocessing timing anomalies", 1969: at most 4/3 of the optimum).
fn deal(core: &QueueCore, taken: &[u64], parts: usize) -> Vec<(u64, usize)> {
    let mut dealt: Vec<(u64, usize)> = taken.iter().map(|seq| (*seq, 0)).collect();
    if parts < 2 {
        return dealt;
    }
    let mut order: Vec<usize> = (0..taken.len()).collect();
    order.sort_by_key(|&place| Reverse(core.rows[&taken[place]].tokens));
    let mut loads: BTreeSet<(u64, usize, usize)> = (0..parts).map(|p| (0, 0, p)).collect();
    for place in order {
        let Some((tokens, rows, part)) = loads.pop_first() else {
            break;
        };
        dealt[place].1 = part;
        let more = core.rows[&taken[place]].tokens;
        loads.insert((tokens.saturating_add(more), rows + 1, part));
    }
    dealt.sort_by_key(|(_, part)| *part);
    dealt
}
