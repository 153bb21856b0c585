//! Sites: what answers the requests of a page, in the process of the run.
//!
//! A browser asks its site for every address through the DevTools pipe, so that an episode needs no port, no
//! other episode can reach its site, and nothing but the site is there.

use crate::plan::Step;
use serde_json::Value;
use sinew_types::Outcome;

/// A request of the page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Request {
    /// `GET`, `POST`, ...
    pub(crate) method: String,
    /// Path from the first slash, without the query.
    pub(crate) path: String,
    /// Fields of the query, decoded, in order.
    pub(crate) query: Vec<(String, String)>,
    /// Fields of a form that was sent with `POST`, decoded, in order.
    pub(crate) form: Vec<(String, String)>,
    /// The `Cookie` header, or nothing.
    pub(crate) cookie: String,
}

impl Request {
    /// The first field of the query with a name, without white space around it.
    pub(crate) fn asked(&self, name: &str) -> &str {
        field(&self.query, name)
    }

    /// The first field of the form with a name, without white space around it.
    pub(crate) fn sent(&self, name: &str) -> &str {
        field(&self.form, name)
    }
}

/// The first field with a name.
fn field<'a>(fields: &'a [(String, String)], name: &str) -> &'a str {
    let found = fields.iter().find(|(n, _)| n == name);
    found.map_or("", |(_, value)| value.trim())
}

/// An answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Response {
    /// Status of HTTP.
    pub(crate) status: u16,
    /// Headers by name.
    pub(crate) headers: Vec<(String, String)>,
    /// The content.
    pub(crate) body: Vec<u8>,
}

impl Response {
    /// A page of HTML.
    pub(crate) fn html(status: u16, body: String) -> Self {
        Self::file("text/html; charset=utf-8", status, body.into_bytes())
    }

    /// Content of a media type.
    pub(crate) fn file(media_type: &str, status: u16, body: Vec<u8>) -> Self {
        Self {
            status,
            headers: vec![("content-type".into(), media_type.into())],
            body,
        }
    }

    /// Sends the browser to another path, with `GET`.
    pub(crate) fn see_other(path: &str) -> Self {
        Self {
            status: 303,
            headers: vec![("location".into(), path.into())],
            body: Vec::new(),
        }
    }
}

/// The site of one episode, with its task.
pub(crate) trait Site: Send {
    /// Path of the first page.
    fn start(&self) -> String;

    /// Expression that is evaluated once in the first page when it is loaded. Its value goes to
    /// [`Site::begun`].
    fn prepare(&self) -> Option<String> {
        None
    }

    /// Task in words, for the model. `prepared` is the value of [`Site::prepare`], or null.
    ///
    /// # Errors
    /// If the page is not what it should be.
    fn begun(&mut self, prepared: &Value) -> Result<String, String>;

    /// Answers a request for an address of this site.
    fn respond(&mut self, request: &Request) -> Response;

    /// Expression that is evaluated after every action. Its value goes to [`Site::probed`].
    fn probe(&self) -> Option<&'static str> {
        None
    }

    /// Takes the value of [`Site::probe`]. Returns true if it ends the episode.
    fn probed(&mut self, value: &Value) -> bool {
        let _ = value;
        false
    }

    /// Score as it stands. `done`: the model said that it is done.
    fn outcome(&self, done: bool) -> Outcome;

    /// Hash of all that the site keeps. `None`: pages keep state that it does not know.
    fn state(&self) -> Option<u64> {
        None
    }

    /// The gold policy for the task of [`Site::begun`], if there is one.
    fn gold(&self) -> Option<Vec<Step>>;
}

/// Splits `path?query` and decodes the query.
pub(crate) fn split_query(address: &str) -> (String, Vec<(String, String)>) {
    let address = address.split('#').next().unwrap_or_default();
    match address.split_once('?') {
        None => (address.to_owned(), Vec::new()),
        Some((path, query)) => (path.to_owned(), fields(query)),
    }
}

/// Decodes `name=value&...`, at most 100 fields.
pub(crate) fn fields(text: &str) -> Vec<(String, String)> {
    let pairs = text.split('&').filter(|pair| !pair.is_empty()).take(100);
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(name), decode(value))
        })
        .collect()
}

/// Decodes `+` and `%41`. What is not valid stays as it is.
fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut out, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let hex = bytes.get(at + 1..at + 3).filter(|_| bytes[at] == b'%');
        let hex = hex.and_then(|h| std::str::from_utf8(h).ok());
        match hex.and_then(|h| u8::from_str_radix(h, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(if bytes[at] == b'+' { b' ' } else { bytes[at] });
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// A text as HTML.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded() {
        let (path, query) = split_query("/search?q=red+caf%C3%A9&max=%zz&empty#top");
        assert_eq!(path, "/search");
        let expected = [("q", "red café"), ("max", "%zz"), ("empty", "")];
        assert_eq!(query, expected.map(|(a, b)| (a.into(), b.into())));
    }

    #[test]
    fn text_cannot_become_markup() {
        assert_eq!(escape("<b a='\"'>&"), "&lt;b a=&#39;&quot;&#39;&gt;&amp;");
    }
}
