//! BM25 over texts in memory.
//!
//! The formula is that of Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond",
//! 2009, equation 3.15, with the logarithm that is never negative.

use std::collections::HashMap;

/// Saturation of the frequency of a word.
const K1: f64 = 1.2;
/// Weight of the length of a text.
const B: f64 = 0.75;
/// Words of a query that count.
const MAX_WORDS: usize = 64;

/// An inverted index.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// Texts with their frequencies, by word.
    postings: HashMap<String, Vec<(u32, u32)>>,
    /// Words of each text.
    lengths: Vec<u32>,
    /// Mean number of words.
    mean: f64,
}

/// Lower-case words of letters and digits.
pub(super) fn words(text: &str) -> impl Iterator<Item = String> {
    text.split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
}

impl Index {
    /// Reads all texts.
    pub(super) fn new<'a>(texts: impl Iterator<Item = [&'a str; 2]>) -> Self {
        let mut index = Self::default();
        for (id, parts) in (0u32..).zip(texts) {
            let mut counts: HashMap<String, u32> = HashMap::new();
            let mut length = 0;
            for word in parts.into_iter().flat_map(words) {
                *counts.entry(word).or_default() += 1;
                length += 1;
            }
            for (word, count) in counts {
                index.postings.entry(word).or_default().push((id, count));
            }
            index.lengths.push(length);
        }
        let all: f64 = index.lengths.iter().map(|l| f64::from(*l)).sum();
        index.mean = all / index.lengths.len().max(1) as f64;
        index
    }

    /// The best `limit` texts, best first; of equal ones the first.
    pub(super) fn search(&self, query: &str, limit: usize) -> Vec<u32> {
        let mut asked: Vec<String> = words(query).take(MAX_WORDS).collect();
        asked.sort_unstable();
        asked.dedup();
        let all = self.lengths.len() as f64;
        let mut scores: HashMap<u32, f64> = HashMap::new();
        for word in asked {
            let Some(found) = self.postings.get(&word) else {
                continue;
            };
            let having = found.len() as f64;
            let rare = (1.0 + (all - having + 0.5) / (having + 0.5)).ln();
            for (id, count) in found {
                let (count, length) = (f64::from(*count), f64::from(self.lengths[*id as usize]));
                let norm = K1 * (1.0 - B + B * length / self.mean);
                *scores.entry(*id).or_default() += rare * count * (K1 + 1.0) / (count + norm);
            }
        }
        let mut ranked: Vec<(u32, f64)> = scores.into_iter().collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        ranked.into_iter().take(limit).map(|(id, _)| id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXTS: [[&str; 2]; 4] = [
        ["Cats", "the cat sat on the mat"],
        ["Dogs", "the dog ran and the dog barked at the dog"],
        ["Both", "a cat and a dog"],
        [
            "Long",
            "the the the the the the the the the the cat the the the the the the",
        ],
    ];

    /// The formula, text by text.
    fn plain(query: &str, texts: &[[&str; 2]]) -> Vec<u32> {
        let lists: Vec<Vec<String>> = texts
            .iter()
            .map(|t| words(&t.join(" ")).collect())
            .collect();
        let mean = lists.iter().map(Vec::len).sum::<usize>() as f64 / lists.len() as f64;
        let mut asked: Vec<String> = words(query).collect();
        asked.sort();
        asked.dedup();
        let score = |list: &[String]| -> f64 {
            let each = asked.iter().map(|w| {
                let having = lists.iter().filter(|l| l.contains(w)).count() as f64;
                let count = list.iter().filter(|x| *x == w).count() as f64;
                let rare = (1.0 + (lists.len() as f64 - having + 0.5) / (having + 0.5)).ln();
                let norm = 1.2 * (1.0 - 0.75 + 0.75 * list.len() as f64 / mean);
                rare * count * 2.2 / (count + norm)
            });
            each.sum()
        };
        let mut ranked: Vec<(u32, f64)> = (0u32..).zip(lists.iter().map(|l| score(l))).collect();
        ranked.retain(|(_, s)| *s > 0.0);
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        ranked.into_iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn rare_words_and_short_texts_come_first() {
        let index = Index::new(TEXTS.into_iter());
        assert_eq!(index.search("cat", 10), [2, 0, 3]);
        assert_eq!(index.search("DOG, dog!", 1), [1]);
        assert!(index.search("zebra", 10).is_empty() && index.search("", 10).is_empty());
    }

    proptest! {
        #[test]
        fn the_index_agrees_with_the_formula(query in "(cat|dog|the|mat|ran|and| ){0,6}") {
            let index = Index::new(TEXTS.into_iter());
            prop_assert_eq!(index.search(&query, 10), plain(&query, &TEXTS));
        }
    }
}
