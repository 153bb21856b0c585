//! Pages of a corpus: a file of JSON Lines, or those of a generator.

use super::index::Index;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// Pages at most.
const MAX_PAGES: usize = 1_000_000;
/// Bytes of all pages at most.
const MAX_BYTES: usize = 1 << 30;

/// A page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CorpusPage {
    /// Name for citations.
    pub id: String,
    /// Its title.
    pub title: String,
    /// Its text.
    pub text: String,
}

/// Pages with their index.
#[derive(Debug)]
pub struct Corpus {
    /// In the order of the file.
    pages: Vec<CorpusPage>,
    /// Places of pages.
    by_id: HashMap<String, usize>,
    /// Over titles and texts.
    index: Index,
}

impl Corpus {
    /// Indexes pages.
    ///
    /// # Errors
    /// If there is none, two have one id, or there are too many.
    pub fn new(pages: Vec<CorpusPage>) -> Result<Self, String> {
        let bytes: usize = pages.iter().map(|p| p.text.len() + p.title.len()).sum();
        if pages.is_empty() || pages.len() > MAX_PAGES || bytes > MAX_BYTES {
            return Err(format!(
                "{} pages of {bytes} bytes; allowed: 1 to {MAX_PAGES} pages, {MAX_BYTES} bytes",
                pages.len()
            ));
        }
        let mut by_id = HashMap::new();
        for (at, page) in pages.iter().enumerate() {
            if let Some(first) = by_id.insert(page.id.clone(), at) {
                return Err(format!(
                    "pages {} and {} have the id {:?}",
                    first + 1,
                    at + 1,
                    page.id
                ));
            }
        }
        let index = Index::new(pages.iter().map(|p| [p.title.as_str(), p.text.as_str()]));
        Ok(Self {
            pages,
            by_id,
            index,
        })
    }

    /// Reads a file with a page a line: `{"id": ..., "title": ..., "text": ...}`.
    ///
    /// # Errors
    /// The line that is wrong, and why.
    pub fn read(file: &Path) -> Result<Self, String> {
        let opened = std::fs::File::open(file).map_err(|e| e.to_string())?;
        let mut pages = Vec::new();
        let mut bytes = 0;
        for (at, line) in BufReader::new(opened).lines().enumerate() {
            let line = line.map_err(|e| format!("line {}: {e}", at + 1))?;
            bytes += line.len();
            if bytes > MAX_BYTES {
                return Err(format!("more than {MAX_BYTES} bytes"));
            }
            if line.trim().is_empty() {
                continue;
            }
            let page = serde_json::from_str(&line).map_err(|e| format!("line {}: {e}", at + 1))?;
            pages.push(page);
        }
        Self::new(pages)
    }

    /// The page of an id.
    pub fn page(&self, id: &str) -> Option<&CorpusPage> {
        self.by_id.get(id).map(|at| &self.pages[*at])
    }

    /// The best pages for a query.
    pub fn search(&self, query: &str, limit: usize) -> Vec<&CorpusPage> {
        let found = self.index.search(query, limit);
        found
            .into_iter()
            .map(|id| &self.pages[id as usize])
            .collect()
    }
}
