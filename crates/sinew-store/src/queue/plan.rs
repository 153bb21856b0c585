//! Plans the changes of each queue operation without making them.

use super::core::{Change, Claim, Hold, QueueCore, Row};
use super::rows::{
    AckedRow, Consumer, Field, LeaseId, MAX_CALL_ROWS, MAX_CONSUMERS, MAX_FIELDS, MAX_KEY,
    MAX_NAME, MAX_REASON, NewRow, PutOutcome, QueueError, ReturnOutcome, RowRequest, RowSelection,
};
use super::sample;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Rows of a lease, each with the index of its part.
#[derive(Debug)]
pub(super) struct PlannedLease {
    pub(super) lease: LeaseId,
    pub(super) until_ms: u64,
    pub(super) rows: Vec<(u64, usize)>,
}

/// Ways in which a holder returns rows without an ack.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReturnKind<'a> {
    /// The rows were not used.
    Released,
    /// The rows failed, with a reason.
    Failed(&'a str),
    /// The rows are kept: their lease is extended to another time.
    Renewed(u64),
}

fn argument<T>(field: &str, value: impl ToString, allowed: String) -> Result<T, QueueError> {
    Err(QueueError::Argument {
        field: field.into(),
        value: value.to_string(),
        allowed,
    })
}

/// Refuses an empty text, and one longer than `limit` bytes.
fn check_text(field: &str, text: &str, limit: usize) -> Result<(), QueueError> {
    match text.len() {
        0 => argument(field, "empty", format!("1 to {limit} bytes")),
        n if n > limit => argument(
            field,
            format!("{n} bytes long"),
            format!("1 to {limit} bytes"),
        ),
        _ => Ok(()),
    }
}

/// Refuses a call with too few or too many rows.
fn check_count(field: &str, rows: usize, least: usize) -> Result<(), QueueError> {
    if (least..=MAX_CALL_ROWS).contains(&rows) {
        Ok(())
    } else {
        argument(field, rows, format!("{least} to {MAX_CALL_ROWS}"))
    }
}

/// Returns a reason, cut to the maximum length.
fn reason(text: &str) -> Arc<str> {
    let mut end = text.len().min(MAX_REASON);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].into()
}

/// A written field of a row.
fn written(seq: u64, field: usize, value: bytes::Bytes) -> Change {
    Change::Write {
        seq,
        field,
        bytes: value.len() as u64,
        value,
    }
}

/// Field names, including those that a call adds.
struct Names<'a> {
    known: &'a QueueCore,
    new: Vec<String>,
}

impl Names<'_> {
    /// Returns the number of a name.
    fn number(&mut self, name: &str) -> Result<usize, QueueError> {
        if let Some(number) = self.known.field(name) {
            return Ok(number);
        }
        let before = self.known.names.len();
        if let Some(place) = self.new.iter().position(|n| n == name) {
            return Ok(before + place);
        }
        check_text("field.name", name, MAX_NAME)?;
        let number = before + self.new.len();
        if number == MAX_FIELDS {
            let allowed = format!("up to {MAX_FIELDS} names in one queue");
            return argument("field.name", name, allowed);
        }
        self.new.push(name.to_owned());
        Ok(number)
    }

    /// Returns the bit set of some names.
    fn mask<'n>(&mut self, names: impl Iterator<Item = &'n String>) -> Result<u64, QueueError> {
        let mut mask = 0u64;
        for name in names {
            mask |= 1 << self.number(name)?;
        }
        Ok(mask)
    }
}

impl QueueCore {
    /// Plans new rows, all or none, in the order of the put.
    pub(super) fn plan_put(
        &self,
        rows: &[NewRow],
    ) -> Result<(Vec<Change>, Vec<PutOutcome>), QueueError> {
        check_count("rows", rows.len(), 0)?;
        let first = self.rows.last_key_value().map_or(0, |(seq, _)| seq + 1);
        let (mut inserts, mut put) = (Vec::new(), Vec::with_capacity(rows.len()));
        let mut names = Names {
            known: self,
            new: Vec::new(),
        };
        let mut units: HashMap<&str, (u64, u32, u32)> = HashMap::new();
        let mut new_keys = BTreeSet::new();
        let mut bytes = 0u64;
        for new in rows {
            if self.by_key.contains_key(new.key.as_str()) || !new_keys.insert(&new.key) {
                put.push(PutOutcome::Duplicate);
                continue;
            }
            let seq = first + inserts.len() as u64;
            let (mut row, values) = self.row_of(new, &mut names)?;
            row.unit = self.unit(seq, new, &mut units);
            bytes = bytes.saturating_add(row.bytes);
            inserts.push(Change::Insert { seq, row, values });
            put.push(PutOutcome::New);
        }
        self.check_room(inserts.len(), bytes)?;
        let mut changes: Vec<Change> = names.new.into_iter().map(Change::Name).collect();
        changes.extend(inserts);
        Ok((changes, put))
    }

    /// Refuses rows that exceed the limits.
    fn check_room(&self, count: usize, added: u64) -> Result<(), QueueError> {
        let (max_rows, max_bytes) = (self.limits.max_rows, self.limits.max_bytes);
        if count > max_rows || added > max_bytes {
            return Err(QueueError::TooLarge {
                rows: count,
                max_rows,
                bytes: added,
                max_bytes,
            });
        }
        let (rows, bytes) = (self.live(), self.bytes);
        let over = rows + count > max_rows || bytes.saturating_add(added) > max_bytes;
        if over && count > 0 {
            Err(QueueError::Full {
                rows,
                max_rows,
                bytes,
                max_bytes,
            })
        } else {
            Ok(())
        }
    }

    /// Builds a row and its values; the caller sets its group number.
    fn row_of(
        &self,
        new: &NewRow,
        names: &mut Names<'_>,
    ) -> Result<(Row, Vec<(usize, bytes::Bytes)>), QueueError> {
        check_text("key", &new.key, MAX_KEY)?;
        if new.group.len() > MAX_KEY {
            check_text("group", &new.group, MAX_KEY)?;
        }
        if new.group_size == 0 {
            return argument("group_size", 0, "1 or more".into());
        }
        let mut fields = 0u64;
        let mut values = Vec::with_capacity(new.fields.len());
        for field in &new.fields {
            let number = names.number(&field.name)?;
            if fields >> number & 1 == 1 {
                let allowed = format!("each name once; row {}", new.key);
                return argument("fields", &field.name, allowed);
            }
            fields |= 1 << number;
            values.push((number, field.value.clone()));
        }
        let key: Arc<str> = new.key.as_str().into();
        let row = Row {
            group: match new.group.as_str() {
                "" => Arc::clone(&key),
                name => name.into(),
            },
            key,
            unit: 0,
            size: new.group_size,
            priority: new.priority,
            tokens: new.tokens,
            version: new.version,
            fields,
            bytes: new.bytes(),
            done: false,
            claims: Vec::new(),
        };
        Ok((row, values))
    }

    /// Returns the group of a new row: the newest one of its name, unless that is complete. `units` holds the
    /// groups that the call has already used: number, rows put, size.
    fn unit<'a>(
        &self,
        seq: u64,
        new: &'a NewRow,
        units: &mut HashMap<&'a str, (u64, u32, u32)>,
    ) -> u64 {
        let name = match new.group.as_str() {
            "" => new.key.as_str(),
            name => name,
        };
        let known = units.get(name).copied().or_else(|| {
            let unit = *self.latest.get(name)?;
            self.groups.get(&unit).map(|g| (unit, g.put, g.size))
        });
        let (unit, put, size) = match known {
            Some((unit, put, size)) if put < size => (unit, put, size),
            _ => (seq, 0, 0),
        };
        units.insert(name, (unit, put + 1, size.max(new.group_size)));
        unit
    }

    /// Plans fields that rows lack. Returns their number as well.
    pub(super) fn plan_fill(&self, rows: &[AckedRow]) -> Result<(Vec<Change>, usize), QueueError> {
        check_count("rows", rows.len(), 0)?;
        let mut names = Names {
            known: self,
            new: Vec::new(),
        };
        let (mut writes, mut seen) = (Vec::new(), BTreeSet::new());
        for done in rows {
            let (seq, row) = self.known(&done.key)?;
            for given in done.fields.iter().filter(|_| !row.done) {
                let field = names.number(&given.name)?;
                if row.fields >> field & 1 == 0 && seen.insert((seq, field)) {
                    writes.push(written(seq, field, given.value.clone()));
                }
            }
        }
        let count = writes.len();
        let mut changes: Vec<Change> = names.new.into_iter().map(Change::Name).collect();
        changes.extend(writes);
        Ok((changes, count))
    }

    /// Plans a new consumer; no change if it has joined with the same fields.
    pub(super) fn plan_join(&self, spec: &Consumer) -> Result<Vec<Change>, QueueError> {
        check_text("consumer.name", &spec.name, MAX_NAME)?;
        let refused = |reason: String| {
            let name = spec.name.clone();
            Err(QueueError::Refused { name, reason })
        };
        if let Some(number) = self.reader(&spec.name) {
            let known = &self.readers[number].spec;
            return if known == spec {
                Ok(Vec::new())
            } else {
                refused(format!(
                    "it joined with needs {:?}, writes {:?}, last {}",
                    known.needs, known.writes, known.last
                ))
            };
        }
        if self.readers.len() == MAX_CONSUMERS {
            return refused(format!("the queue has {MAX_CONSUMERS} consumers"));
        }
        let mut names = Names {
            known: self,
            new: Vec::new(),
        };
        let needs = names.mask(spec.needs.iter())?;
        let writes = names.mask(spec.writes.iter())?;
        if needs & writes != 0 {
            return refused("it writes a field that it needs".into());
        }
        if let Some(other) = self.readers.iter().find(|r| r.writes & writes != 0) {
            return refused(format!("{:?} writes the same field", other.spec.name));
        }
        let mut changes: Vec<Change> = names.new.into_iter().map(Change::Name).collect();
        changes.push(Change::Join(spec.clone()));
        Ok(changes)
    }

    /// Returns the number of a consumer, or an error if it has not joined.
    pub(super) fn known_reader(&self, name: &str) -> Result<usize, QueueError> {
        let unknown = || QueueError::UnknownConsumer { name: name.into() };
        self.reader(name).ok_or_else(unknown)
    }

    /// Plans a lease on ready rows; `None` if there are none. Expired leases must have been taken back
    /// before.
    pub(super) fn plan_lease(
        &self,
        ask: &RowRequest,
        now_ms: u64,
    ) -> Result<Option<(Vec<Change>, PlannedLease)>, QueueError> {
        let reader = self.known_reader(&ask.consumer)?;
        check_text("holder", &ask.holder, MAX_NAME)?;
        if ask.ttl_ms == 0 {
            return argument("ttl_ms", 0, "1 or more".into());
        }
        let rows = match &ask.take {
            RowSelection::Keys(keys) => self.named(reader, keys)?,
            RowSelection::Sample(sample) => {
                check_count("rows", sample.rows, 1)?;
                check_count("parts", sample.parts, 1)?;
                sample::choose(self, reader, sample)
            }
        };
        if rows.is_empty() {
            return Ok(None);
        }
        let lease = LeaseId(self.next_lease);
        let until_ms = now_ms.saturating_add(ask.ttl_ms);
        let holder: Arc<str> = ask.holder.as_str().into();
        let mut changes = Vec::with_capacity(rows.len() + 1);
        for &(seq, _) in &rows {
            let before = self.claim(&self.rows[&seq], reader);
            let claim = Claim {
                hold: Hold::Leased {
                    until_ms,
                    holder: Arc::clone(&holder),
                },
                lease: Some(lease.0),
                attempts: before.attempts + 1,
            };
            changes.push(Change::Claim { seq, reader, claim });
        }
        changes.push(Change::NextLease(self.next_lease + 1));
        Ok(Some((
            changes,
            PlannedLease {
                lease,
                until_ms,
                rows,
            },
        )))
    }

    /// Returns the rows of `keys`, each once, if all are ready.
    fn named(&self, reader: usize, keys: &[String]) -> Result<Vec<(u64, usize)>, QueueError> {
        check_count("keys", keys.len(), 1)?;
        let mut chosen = BTreeSet::new();
        for key in keys {
            let (seq, row) = self.known(key)?;
            let open = self.claim(row, reader).hold == Hold::Open && !row.done;
            if !open || !self.readers[reader].wants(row.fields) {
                return Err(QueueError::NotReady { key: key.clone() });
            }
            chosen.insert(seq);
        }
        Ok(chosen.into_iter().map(|seq| (seq, 0)).collect())
    }

    fn known(&self, key: &str) -> Result<(u64, &Row), QueueError> {
        let seq = self.by_key.get(key);
        let row = seq.and_then(|seq| Some((*seq, self.rows.get(seq)?)));
        row.ok_or_else(|| QueueError::UnknownRow { key: key.into() })
    }

    /// Calls `each` once for every row of `keys` that the lease holds. Returns the number of calls that
    /// returned `true`, and the keys that the lease does not hold.
    fn plan_held<'a>(
        &self,
        reader: usize,
        lease: LeaseId,
        keys: impl Iterator<Item = &'a String>,
        mut each: impl FnMut(usize, u64, &Row, Claim) -> Result<bool, QueueError>,
    ) -> Result<ReturnOutcome, QueueError> {
        let mut settled = ReturnOutcome::default();
        let mut seen = BTreeSet::new();
        for (place, key) in keys.enumerate() {
            let held = self.known(key).ok().filter(|(_, row)| {
                let claim = row.claims.get(reader);
                claim.and_then(|c| c.lease) == Some(lease.0)
            });
            match held {
                None => settled.lost.push(key.clone()),
                Some((seq, _)) if !seen.insert(seq) => {}
                Some((seq, row)) => {
                    let changed = each(place, seq, row, self.claim(row, reader))?;
                    settled.changed += usize::from(changed);
                }
            }
        }
        Ok(settled)
    }

    /// Plans an ack.
    pub(super) fn plan_ack(
        &self,
        consumer: &str,
        lease: LeaseId,
        rows: &[AckedRow],
    ) -> Result<(Vec<Change>, ReturnOutcome), QueueError> {
        let number = self.known_reader(consumer)?;
        let reader = &self.readers[number];
        let mut changes = Vec::new();
        let keys = rows.iter().map(|d| &d.key);
        let settled = self.plan_held(number, lease, keys, |place, seq, row, mut claim| {
            let values = self.written(number, &rows[place])?;
            if claim.hold == Hold::Acked {
                return Ok(false);
            }
            claim.hold = Hold::Acked;
            changes.push(Change::Claim {
                seq,
                reader: number,
                claim,
            });
            let mut others = self.readers.iter().enumerate();
            let acked = |n: usize| row.claims.get(n).is_some_and(|c| c.hold == Hold::Acked);
            if row.done {
            } else if reader.spec.last
                && others.all(|(n, r)| n == number || !r.spec.last || acked(n))
            {
                changes.push(Change::Finish { seq });
            } else {
                let values = values.into_iter();
                changes.extend(values.map(|(field, value)| written(seq, field, value)));
            }
            Ok(true)
        })?;
        Ok((changes, settled))
    }

    /// Returns the fields of an ack, which must be exactly those that the consumer writes.
    fn written(
        &self,
        reader: usize,
        done: &AckedRow,
    ) -> Result<Vec<(usize, bytes::Bytes)>, QueueError> {
        let reader = &self.readers[reader];
        let number = |f: &Field| Some((self.field(&f.name)?, f.value.clone()));
        let values: Option<Vec<_>> = done.fields.iter().map(number).collect();
        let fits = |values: &Vec<(usize, bytes::Bytes)>| {
            let mask = values.iter().fold(0u64, |mask, (n, _)| mask | 1 << n);
            mask == reader.writes && values.len() == reader.writes.count_ones() as usize
        };
        values.filter(fits).ok_or_else(|| QueueError::WrongFields {
            key: done.key.clone(),
            consumer: reader.spec.name.clone(),
            writes: reader.spec.writes.clone(),
            has: done.fields.iter().map(|f| f.name.clone()).collect(),
        })
    }

    /// Plans a release, a failure or a renewal.
    pub(super) fn plan_back(
        &self,
        consumer: &str,
        lease: LeaseId,
        keys: &[String],
        how: ReturnKind<'_>,
    ) -> Result<(Vec<Change>, ReturnOutcome), QueueError> {
        let reader = self.known_reader(consumer)?;
        let mut changes = Vec::new();
        let mut late = Vec::new();
        let mut settled =
            self.plan_held(reader, lease, keys.iter(), |place, seq, _, mut claim| {
                let Hold::Leased { holder, .. } = &claim.hold else {
                    // A row that was taken back can be acked, but no longer kept from others.
                    late.extend(matches!(how, ReturnKind::Renewed(_)).then(|| keys[place].clone()));
                    return Ok(false);
                };
                match how {
                    ReturnKind::Released => {
                        claim.hold = Hold::Open;
                        claim.attempts -= 1;
                        claim.lease = None;
                    }
                    ReturnKind::Failed(why) => {
                        claim.hold = self.after(claim.attempts, || reason(why));
                        claim.lease = None;
                    }
                    ReturnKind::Renewed(until_ms) => {
                        let holder = Arc::clone(holder);
                        claim.hold = Hold::Leased { until_ms, holder };
                    }
                }
                changes.push(Change::Claim { seq, reader, claim });
                Ok(true)
            })?;
        settled.lost.extend(late);
        Ok((changes, settled))
    }

    /// Returns the state of a row after its delivery number `attempts` failed.
    fn after(&self, attempts: u32, why: impl FnOnce() -> Arc<str>) -> Hold {
        if attempts >= self.limits.max_attempts {
            Hold::Dead { reason: why() }
        } else {
            Hold::Open
        }
    }

    /// Plans to take back the rows of leases that expired at or before `now_ms`.
    pub(super) fn plan_expire(&self, now_ms: u64) -> Vec<Change> {
        let mut changes = Vec::new();
        for (number, reader) in self.readers.iter().enumerate() {
            for &(_, seq) in reader.leased.range(..=(now_ms, u64::MAX)) {
                let row = &self.rows[&seq];
                let mut claim = self.claim(row, number);
                let Hold::Leased { holder, .. } = &claim.hold else {
                    continue;
                };
                let why = || {
                    let count = claim.attempts;
                    reason(&format!(
                        "delivered {count} times; the last lease, of {holder}, ran out"
                    ))
                };
                claim.hold = if row.done {
                    Hold::Open
                } else {
                    self.after(claim.attempts, why)
                };
                changes.push(Change::Claim {
                    seq,
                    reader: number,
                    claim,
                });
            }
        }
        changes
    }

    /// Plans to make dead rows of a consumer ready.
    pub(super) fn plan_revive(
        &self,
        consumer: &str,
        keys: &[String],
    ) -> Result<Vec<Change>, QueueError> {
        let reader = self.known_reader(consumer)?;
        let mut dead = BTreeSet::new();
        for key in keys {
            let (seq, row) = self.known(key)?;
            dead.extend(matches!(self.claim(row, reader).hold, Hold::Dead { .. }).then_some(seq));
        }
        let claim = Claim::default();
        let revive = |seq| Change::Claim {
            seq,
            reader,
            claim: claim.clone(),
        };
        Ok(dead.into_iter().map(revive).collect())
    }

    /// Plans to remove rows that are not done.
    pub(super) fn plan_remove(&self, keys: &[String]) -> Result<Vec<Change>, QueueError> {
        let mut chosen = BTreeSet::new();
        for key in keys {
            let (seq, row) = self.known(key)?;
            let mut claims = row.claims.iter();
            if row.done || claims.any(|c| matches!(c.hold, Hold::Leased { .. })) {
                return Err(QueueError::NotReady { key: key.clone() });
            }
            chosen.insert(seq);
        }
        Ok(chosen
            .into_iter()
            .map(|seq| Change::Forget { seq })
            .collect())
    }

    /// Plans to remove the oldest finished groups until `keep` rows are left. The newest row stays known,
    /// since its number determines the next one's.
    pub(super) fn plan_forget(&self, keep: usize) -> Vec<Change> {
        let mut surplus = self.done.saturating_sub(keep);
        let newest = self.rows.last_key_value().map(|(seq, _)| *seq);
        let mut changes = Vec::new();
        for unit in &self.finished {
            let rows = &self.groups[unit].done;
            if rows.len() > surplus {
                break;
            }
            if newest.is_some_and(|n| rows.contains(&n)) {
                continue;
            }
            surplus -= rows.len();
            changes.extend(rows.iter().map(|&seq| Change::Forget { seq }));
        }
        changes
    }
}
