//! The Prometheus text format, as far as engines use it. Pure.
//! <https://prometheus.io/docs/instrumenting/exposition_formats/>

use std::collections::HashMap;

/// One line: a name, its labels, its value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    pub(crate) name: String,
    pub(crate) labels: HashMap<String, String>,
    pub(crate) value: f64,
}

/// Every sample of an answer; lines that are not a sample are skipped: a server may add any.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    samples: Vec<Sample>,
}

impl Metrics {
    pub(crate) fn parse(text: &str) -> Self {
        let samples = text.lines().filter_map(sample).collect();
        Self { samples }
    }

    /// Samples called `name`: one for each engine process behind the server.
    pub(crate) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |s| s.name == name)
    }

    /// Value of the first sample called `name`.
    pub(crate) fn first(&self, name: &str) -> Option<f64> {
        self.all(name).next().map(|s| s.value)
    }

    /// Sum of a counter or gauge over all processes; `None` if it is not there.
    pub(crate) fn sum(&self, name: &str) -> Option<f64> {
        let mut values = self.all(name).map(|s| s.value).peekable();
        values.peek()?;
        Some(values.sum())
    }

    /// The sum as a count; 0 if it is missing or negative.
    pub(crate) fn count(&self, name: &str) -> u64 {
        self.sum(name).filter(|v| *v >= 0.0).unwrap_or(0.0) as u64
    }
}

fn sample(line: &str) -> Option<Sample> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return None;
    }
    let name_end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(name_end);
    let mut labels = HashMap::new();
    let rest = match rest.strip_prefix('{') {
        Some(inner) => parse_labels(inner, &mut labels)?,
        None => rest,
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample {
        name: name.to_owned(),
        labels,
        value,
    })
}

/// Reads `a="x",b="y"}` and returns what follows.
fn parse_labels<'a>(mut text: &'a str, labels: &mut HashMap<String, String>) -> Option<&'a str> {
    loop {
        text = text.trim_start_matches([',', ' ']);
        if let Some(rest) = text.strip_prefix('}') {
            return Some(rest);
        }
        let (key, rest) = text.split_once('=')?;
        let mut chars = rest.strip_prefix('"')?.char_indices();
        let mut value = String::new();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => value.push(match chars.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, other) => value.push(other),
            }
        };
        labels.insert(key.trim().to_owned(), value);
        text = &rest[end + 2..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn samples_labels_and_sums() {
        let text = "# HELP x y\n# TYPE x gauge\n\
            vllm:num_requests_running{engine=\"0\",model_name=\"a,b}\"} 2.0\n\
            vllm:num_requests_running{engine=\"1\",model_name=\"a\\\"b\"} 3.0\n\
            process_start_time_seconds 1.7952470873e+09\n\
            broken{x=\"\n\
            nan_value NaN\n";
        let m = Metrics::parse(text);
        assert_eq!(m.sum("vllm:num_requests_running"), Some(5.0));
        assert_eq!(m.count("vllm:num_requests_running"), 5);
        let labels: Vec<_> = m
            .all("vllm:num_requests_running")
            .map(|s| &s.labels["model_name"])
            .collect();
        assert_eq!(labels, ["a,b}", "a\"b"]);
        assert_eq!(m.first("process_start_time_seconds"), Some(1_795_247_087.3));
        assert_eq!(m.sum("absent"), None);
        assert_eq!(m.count("nan_value"), 0);
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(text in "[ -~\n]{0,200}") {
            let _ = Metrics::parse(&text);
        }
    }
}
