//! Scoring of rows before advantages are known.
//!
//! Some algorithms need log-probabilities or values of other models for each token
//! ([`crate::Algorithm::needs`]). A trainer scores rows, and an algorithm reads columns by episode and node.
//! A [`Draft`] converts scores of rows to columns.

use crate::batch::Batch;
use crate::episode::{Columns, EpisodeColumns};
use crate::error::AlgoError;
use crate::pipeline::Prepared;
use sinew_types::{EpisodeId, NodeId, RowMasks, TokenLogprob, TrainRow};

/// Column for scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// Values of the critic.
    Values,
    /// Log-probabilities of the reference model.
    RefLogprobs,
    /// Log-probabilities of the proximal policy.
    ProxLogprobs,
    /// Log-probabilities of the teacher.
    TeacherLogprobs,
}

/// Rows to score. Every sampled token that can train has weight 1 in exactly one row.
#[derive(Clone, Debug)]
pub struct Draft {
    rows: Vec<TrainRow>,
    /// Positions with weight 1 for each row: position, node, offset in the node.
    places: Vec<Vec<(usize, NodeId, u32)>>,
    /// Leaf of the path for each row that needs a value after its last token.
    cut: Vec<Option<NodeId>>,
    /// Node lengths of each episode.
    shapes: Vec<(EpisodeId, Vec<usize>)>,
}

impl Prepared<'_> {
    /// Creates rows of all usable episodes. `columns` contributes the masks of tokens that were sampled under
    /// a format.
    ///
    /// # Errors
    /// [`AlgoError`] if a mask is missing or a row is invalid.
    pub fn draft(&self, columns: &Columns) -> Result<Draft, AlgoError> {
        Draft::of(&self.batch, columns)
    }
}

impl Draft {
    fn of(batch: &Batch<'_>, columns: &Columns) -> Result<Self, AlgoError> {
        let mut draft = Self {
            rows: Vec::new(),
            places: Vec::new(),
            cut: Vec::new(),
            shapes: Vec::new(),
        };
        for i in batch.members() {
            let episode = &batch.episodes[i];
            let lengths = episode.trace.nodes.iter().map(|n| n.tokens.len());
            let id = episode.trace.episode.clone();
            let masks = columns.get(&id);
            draft.shapes.push((id, lengths.collect()));
            for path in &episode.paths {
                draft
                    .rows
                    .push(crate::aggregate::row(episode, path, 1.0, masks)?);
                let trained = (0..path.tokens.len()).filter(|&t| path.trains[t]);
                let place = |t: usize| (t, path.tokens[t].node, path.offsets[t]);
                draft.places.push(trained.map(place).collect());
                let leaf = path.tokens.last().map(|t| t.node);
                draft.cut.push(leaf.filter(|_| episode.bootstrapped));
            }
        }
        Ok(draft)
    }

    /// The rows to score.
    pub fn rows(&self) -> &[TrainRow] {
        &self.rows
    }

    /// The rows for a critic. Truncated rows have an additional token of arbitrary id; its position receives
    /// the value after the path.
    pub fn value_rows(&self) -> Vec<TrainRow> {
        let longer = |(row, cut): (&TrainRow, &Option<NodeId>)| {
            let mut row = row.clone();
            if cut.is_some() {
                row.tokens.push(0);
                row.weights.push(1.0);
                row.advantages.push(0.0);
                row.behaviour_logprobs.push(0.0);
                if !row.temperatures.is_empty() {
                    row.temperatures.push(1.0);
                }
                if let Some(masks) = &mut row.masks {
                    masks.rows.push(RowMasks::ALL);
                }
            }
            row
        };
        self.rows.iter().zip(&self.cut).map(longer).collect()
    }

    /// Adds a critic's scores of [`Draft::value_rows`] to `columns`.
    ///
    /// # Errors
    /// [`AlgoError::Scores`] if a length is wrong.
    pub fn fill_values(
        &self,
        columns: &mut Columns,
        mut scores: Vec<Vec<f32>>,
    ) -> Result<(), AlgoError> {
        for ((row, cut), scores) in self.rows.iter().zip(&self.cut).zip(&mut scores) {
            if let (Some(leaf), true) = (cut, scores.len() == row.tokens.len() + 1) {
                let given = columns.entry(row.episode.clone()).or_default();
                given.values_after.extend(scores.pop().map(|v| (*leaf, v)));
            }
        }
        self.fill(columns, Column::Values, &scores)
    }

    /// Adds scores to `columns`: one vector per row with the row's length. Only entries at weight 1 are read.
    ///
    /// # Errors
    /// [`AlgoError::Scores`] if a length is wrong.
    pub fn fill(
        &self,
        columns: &mut Columns,
        column: Column,
        scores: &[Vec<f32>],
    ) -> Result<(), AlgoError> {
        self.check(scores)?;
        for (id, lengths) in &self.shapes {
            let given = columns.entry(id.clone()).or_default();
            let zeros = lengths.iter().map(|&n| vec![0.0; n]).collect();
            *slot(given, column) = Some(zeros);
        }
        for ((row, places), scores) in self.rows.iter().zip(&self.places).zip(scores) {
            let given = columns.entry(row.episode.clone()).or_default();
            if let Some(by_node) = slot(given, column) {
                for &(position, node, offset) in places {
                    by_node[node as usize][offset as usize] = scores[position];
                }
            }
        }
        Ok(())
    }

    /// Fills like [`Draft::fill`], for the teacher's most likely tokens.
    ///
    /// # Errors
    /// [`AlgoError::Scores`] if a length is wrong.
    pub fn fill_top(
        &self,
        columns: &mut Columns,
        tops: &[Vec<Vec<TokenLogprob>>],
    ) -> Result<(), AlgoError> {
        self.check(tops)?;
        for (id, lengths) in &self.shapes {
            let given = columns.entry(id.clone()).or_default();
            let empty = lengths.iter().map(|&n| vec![Vec::new(); n]).collect();
            given.teacher_top = Some(empty);
        }
        for ((row, places), tops) in self.rows.iter().zip(&self.places).zip(tops) {
            let given = columns.entry(row.episode.clone()).or_default();
            if let Some(by_node) = &mut given.teacher_top {
                for &(position, node, offset) in places {
                    by_node[node as usize][offset as usize].clone_from(&tops[position]);
                }
            }
        }
        Ok(())
    }

    /// Checks the lengths of scores.
    fn check<T>(&self, scores: &[Vec<T>]) -> Result<(), AlgoError> {
        let wrong = |what, actual, expected| AlgoError::Scores {
            what,
            actual,
            expected,
        };
        if scores.len() != self.rows.len() {
            return Err(wrong("rows", scores.len(), self.rows.len()));
        }
        for (row, scores) in self.rows.iter().zip(scores) {
            if scores.len() != row.tokens.len() {
                return Err(wrong("tokens of a row", scores.len(), row.tokens.len()));
            }
        }
        Ok(())
    }
}

fn slot(columns: &mut EpisodeColumns, column: Column) -> &mut Option<Vec<Vec<f32>>> {
    match column {
        Column::Values => &mut columns.values,
        Column::RefLogprobs => &mut columns.ref_logprobs,
        Column::ProxLogprobs => &mut columns.prox_logprobs,
        Column::TeacherLogprobs => &mut columns.teacher_logprobs,
    }
}
