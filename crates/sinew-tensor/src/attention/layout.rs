//! Visibility between tokens: packed sequences that share prefixes, as a forest of segments.

use thiserror::Error;

/// A run of consecutive tokens of one sequence, stored in consecutive rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First row of the run.
    pub start: u32,
    /// Number of rows in the run, at least 1.
    pub len: u32,
    /// Position id of the first token, as rotary embeddings use it.
    pub position: u32,
    /// Index of the earlier segment whose last token precedes the first token of this one.
    pub parent: Option<u32>,
}

/// Reasons why a list of segments does not describe a forest of sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// A segment holds no rows.
    #[error("segment {segment} has len 0, a segment holds at least one row: leave it out")]
    EmptySegment {
        /// Index of the segment.
        segment: usize,
    },
    /// Rows are skipped or used twice.
    #[error(
        "segment {segment} starts at row {start}, the rows before it end at {expected}: segments cover rows without gap or overlap"
    )]
    NotContiguous {
        /// Index of the segment.
        segment: usize,
        /// Row at which it starts.
        start: u32,
        /// Row at which it has to start.
        expected: u32,
    },
    /// A parent is not an earlier segment.
    #[error(
        "segment {segment} names parent {parent}, only earlier segments (below {segment}) can be parents"
    )]
    ParentNotEarlier {
        /// Index of the segment.
        segment: usize,
        /// Parent that it names.
        parent: u32,
    },
    /// Position ids do not continue the parent's.
    #[error(
        "segment {segment} has position {position}, it has to be {expected}: the parent's position plus its len, or 0 without parent"
    )]
    WrongPosition {
        /// Index of the segment.
        segment: usize,
        /// Position that it names.
        position: u32,
        /// Position that follows from its parent.
        expected: u32,
    },
    /// Rows or positions do not fit in 32 bits.
    #[error("segment {segment} ends beyond row or position {max}, use smaller batches", max = u32::MAX)]
    TooLarge {
        /// Index of the segment.
        segment: usize,
    },
}

/// A forest of segments over rows `0..rows`, in topological order.
///
/// A token attends to every token of every ancestor of its segment, and causally (itself included) to its own
/// segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeLayout {
    segments: Vec<Segment>,
    positions: Vec<u32>,
}

impl TreeLayout {
    /// Checks the segments and derives each row's position.
    ///
    /// # Errors
    /// A [`LayoutError`] names the first segment that breaks coverage, order or positions.
    pub fn new(segments: Vec<Segment>) -> Result<Self, LayoutError> {
        let mut rows = 0u32;
        for (index, segment) in segments.iter().enumerate() {
            check_segment(index, segment, &segments, rows)?;
            // Positions never exceed the row, so this bounds both.
            rows = rows
                .checked_add(segment.len)
                .ok_or(LayoutError::TooLarge { segment: index })?;
        }
        let positions = segments
            .iter()
            .flat_map(|s| s.position..s.position + s.len)
            .collect();
        Ok(Self {
            segments,
            positions,
        })
    }

    /// Independent sequences of the given lengths, one after the other.
    ///
    /// # Errors
    /// A length of 0, or more than `u32::MAX` rows.
    pub fn sequences(lens: &[u32]) -> Result<Self, LayoutError> {
        let mut start = 0u32;
        let mut segments = Vec::with_capacity(lens.len());
        for (segment, &len) in lens.iter().enumerate() {
            segments.push(Segment {
                start,
                len,
                position: 0,
                parent: None,
            });
            start = start
                .checked_add(len)
                .ok_or(LayoutError::TooLarge { segment })?;
        }
        Self::new(segments)
    }

    /// Number of rows covered.
    pub fn rows(&self) -> usize {
        self.positions.len()
    }

    /// The segments, parents before children.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Position id of each row, `[rows]`.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }
}

fn check_segment(
    index: usize,
    segment: &Segment,
    all: &[Segment],
    rows: u32,
) -> Result<(), LayoutError> {
    if segment.len == 0 {
        return Err(LayoutError::EmptySegment { segment: index });
    }
    if segment.start != rows {
        return Err(LayoutError::NotContiguous {
            segment: index,
            start: segment.start,
            expected: rows,
        });
    }
    let expected = match segment.parent {
        None => 0,
        Some(parent) if (parent as usize) < index => {
            all[parent as usize].position + all[parent as usize].len
        }
        Some(parent) => {
            return Err(LayoutError::ParentNotEarlier {
                segment: index,
                parent,
            });
        }
    };
    if segment.position != expected {
        return Err(LayoutError::WrongPosition {
            segment: index,
            position: segment.position,
            expected,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(start: u32, len: u32, position: u32, parent: Option<u32>) -> Segment {
        Segment {
            start,
            len,
            position,
            parent,
        }
    }

    #[test]
    fn positions_continue_those_of_ancestors() {
        let layout = TreeLayout::new(vec![
            segment(0, 2, 0, None),
            segment(2, 1, 2, Some(0)),
            segment(3, 3, 2, Some(0)),
            segment(6, 1, 3, Some(1)),
        ])
        .unwrap();
        assert_eq!(layout.rows(), 7);
        assert_eq!(layout.positions(), [0, 1, 2, 2, 3, 4, 3]);
    }

    #[test]
    fn sequences_are_independent_roots() {
        let layout = TreeLayout::sequences(&[2, 3]).unwrap();
        assert_eq!(layout.positions(), [0, 1, 0, 1, 2]);
        assert_eq!(TreeLayout::sequences(&[]).unwrap().rows(), 0);
    }

    #[test]
    fn broken_layouts_are_refused_with_the_segment() {
        let cases = [
            (
                vec![segment(0, 0, 0, None)],
                LayoutError::EmptySegment { segment: 0 },
            ),
            (
                vec![segment(0, 2, 0, None), segment(3, 1, 0, None)],
                LayoutError::NotContiguous {
                    segment: 1,
                    start: 3,
                    expected: 2,
                },
            ),
            (
                vec![segment(0, 2, 0, Some(0))],
                LayoutError::ParentNotEarlier {
                    segment: 0,
                    parent: 0,
                },
            ),
            (
                vec![segment(0, 2, 0, None), segment(2, 1, 0, Some(0))],
                LayoutError::WrongPosition {
                    segment: 1,
                    position: 0,
                    expected: 2,
                },
            ),
            (
                vec![segment(0, u32::MAX, 0, None), segment(u32::MAX, 1, 0, None)],
                LayoutError::TooLarge { segment: 1 },
            ),
        ];
        for (segments, expected) in cases {
            assert_eq!(TreeLayout::new(segments), Err(expected));
        }
        assert_eq!(
            TreeLayout::sequences(&[u32::MAX, 1]),
            Err(LayoutError::TooLarge { segment: 1 })
        );
    }
}
