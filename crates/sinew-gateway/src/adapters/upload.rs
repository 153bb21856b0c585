//! Uploaded adapters: a form (`multipart/form-data`, RFC 7578) with the two files of PEFT.

use super::peft::{CONFIG, WEIGHTS};
use bytes::Bytes;
use memchr::memmem;
use sinew_dialect::ApiError;
use sinew_types::PolicyVersion;

/// Maximum length of a boundary, as RFC 2046 defines it.
const MAX_BOUNDARY: usize = 70;
/// Maximum bytes of the headers of a part.
const MAX_HEAD_BYTES: usize = 8 << 10;
/// Name of the part with the version.
const VERSION: &str = "version";

/// The content of an upload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Upload {
    pub(super) config: Bytes,
    pub(super) weights: Bytes,
    pub(super) version: Option<PolicyVersion>,
}

fn invalid(why: impl Into<String>) -> ApiError {
    ApiError::bad_request("invalid_form", why)
}

/// The boundary of a form's parts; `None`: the body is not a form.
///
/// # Errors
/// If a form has no boundary, or one that is not allowed.
pub(crate) fn boundary(content_type: &str) -> Result<Option<String>, ApiError> {
    let (kind, fields) = content_type.split_once(';').unwrap_or((content_type, ""));
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return Ok(None);
    }
    let given = fields.split(';').find_map(|field| {
        let (name, value) = field.split_once('=')?;
        let named = name.trim().eq_ignore_ascii_case("boundary");
        named.then(|| value.trim().trim_matches('"').to_owned())
    });
    match given.filter(|b| (1..=MAX_BOUNDARY).contains(&b.len())) {
        Some(boundary) => Ok(Some(boundary)),
        None => Err(invalid(format!(
            "content-type {content_type:?}: a form needs a boundary of 1 to {MAX_BOUNDARY} characters"
        ))),
    }
}

/// Reads a form: the parts `adapter_config.json` and `adapter_model.safetensors`, by their names or file
/// names, and `version`, which may be left out.
///
/// # Errors
/// If the form is cut, a part is missing, given twice or unknown, or the version is not a number.
pub(super) fn read(boundary: &str, body: &Bytes) -> Result<Upload, ApiError> {
    let (mut config, mut weights, mut version) = (None, None, None);
    for (name, content) in parts(boundary, body)? {
        let place = match name.as_str() {
            CONFIG => &mut config,
            WEIGHTS => &mut weights,
            VERSION => &mut version,
            other => {
                return Err(invalid(format!(
                    "unknown part {other:?}; allowed: {CONFIG}, {WEIGHTS} and {VERSION}"
                )));
            }
        };
        if place.replace(content).is_some() {
            return Err(invalid(format!("part {name} is there twice")));
        }
    }
    let missing = |name: &str| invalid(format!("part {name} is missing"));
    let number = |text: &Bytes| {
        let text = std::str::from_utf8(text).unwrap_or_default();
        let number = text.trim().parse::<u64>().ok();
        number
            .ok_or_else(|| ApiError::invalid(VERSION, "version: expected a whole number from 0 on"))
    };
    Ok(Upload {
        config: config.ok_or_else(|| missing(CONFIG))?,
        weights: weights.ok_or_else(|| missing(WEIGHTS))?,
        version: version.as_ref().map(number).transpose()?.map(PolicyVersion),
    })
}

/// The parts of a form with their names; a part with a file name that is allowed has this name.
fn parts(boundary: &str, body: &Bytes) -> Result<Vec<(String, Bytes)>, ApiError> {
    let cut = || {
        invalid(format!(
            "the form ends without its last boundary --{boundary}--"
        ))
    };
    let delimiter = format!("\r\n--{boundary}");
    let find = memmem::Finder::new(&delimiter);
    let mut at = if body.starts_with(&delimiter.as_bytes()[2..]) {
        delimiter.len() - 2
    } else {
        find.find(body).ok_or_else(cut)? + delimiter.len()
    };
    let mut found = Vec::new();
    loop {
        let rest = &body[at..];
        if rest.starts_with(b"--") {
            return Ok(found);
        }
        let head = &rest[..rest.len().min(MAX_HEAD_BYTES)];
        let end = memmem::find(head, b"\r\n\r\n").ok_or_else(cut)?;
        let name = name(&String::from_utf8_lossy(&head[..end]))?;
        let from = at + end + 4;
        // The break before a boundary belongs to it, also if the part is empty.
        let length = find.find(&body[from - 2..]).ok_or_else(cut)?;
        let to = (from - 2 + length).max(from);
        found.push((name, body.slice(from..to)));
        at = from - 2 + length + delimiter.len();
    }
}

/// The name of a part by its headers.
fn name(head: &str) -> Result<String, ApiError> {
    let header = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        let named = name.trim().eq_ignore_ascii_case("content-disposition");
        named.then_some(value)
    });
    let header = header.ok_or_else(|| invalid("a part has no content-disposition"))?;
    let file = field(header, "filename");
    let file = file
        .as_deref()
        .and_then(|name| name.rsplit(['/', '\\']).next());
    match file.filter(|file| [CONFIG, WEIGHTS].contains(file)) {
        Some(file) => Ok(file.to_owned()),
        None => field(header, "name").ok_or_else(|| invalid("a part has no name")),
    }
}

/// A field of a header, with or without quotes.
fn field(header: &str, name: &str) -> Option<String> {
    let value = header.split(';').find_map(|field| {
        let (found, value) = field.split_once('=')?;
        found.trim().eq_ignore_ascii_case(name).then_some(value)
    });
    value.map(|value| value.trim().trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(parts: &[(&str, &str)]) -> Bytes {
        let mut text = String::from("a preamble");
        for (head, content) in parts {
            text += &format!("\r\n--x\r\nContent-Disposition: form-data; {head}\r\n\r\n{content}");
        }
        format!("{text}\r\n--x--\r\n").into()
    }

    const CONFIG_PART: (&str, &str) = ("name=\"adapter_config.json\"", "{}");
    const WEIGHTS_PART: (&str, &str) = (
        "name=\"file\"; filename=\"a/adapter_model.safetensors\"\r\nContent-Type: a/b",
        "\r\n--y\r\n\r\n--",
    );

    #[test]
    fn parts_are_found_by_name_or_file_name() {
        let version = ("name=version", "12");
        let read = read("x", &form(&[CONFIG_PART, WEIGHTS_PART, version])).unwrap();
        let expected = Upload {
            config: "{}".into(),
            weights: "\r\n--y\r\n\r\n--".into(),
            version: Some(PolicyVersion(12)),
        };
        assert_eq!(read, expected);
        let without = form(&[("name=\"adapter_config.json\"", ""), WEIGHTS_PART]);
        let without = super::read("x", &without.slice("a preamble\r\n".len()..)).unwrap();
        assert_eq!((without.config.len(), without.version), (0, None));
    }

    #[test]
    fn other_forms_are_refused() {
        let refused = |body: Bytes, part: &str| {
            let error = read("x", &body).unwrap_err();
            assert_eq!(error.status, 400);
            assert!(error.message.contains(part), "{error}");
        };
        refused(form(&[CONFIG_PART]), "adapter_model.safetensors is missing");
        refused(form(&[CONFIG_PART, CONFIG_PART]), "twice");
        refused(
            form(&[("name=\"README.md\"", "")]),
            "unknown part \"README.md\"",
        );
        refused(form(&[("filename=\"a\"", "")]), "no name");
        let version = ("name=\"version\"", "-1");
        refused(form(&[CONFIG_PART, WEIGHTS_PART, version]), "version");
        let whole = form(&[CONFIG_PART, WEIGHTS_PART]);
        for end in 0..whole.len() - 3 {
            refused(whole.slice(..end), "last boundary");
        }
        refused(
            "--x\r\na: b\r\n\r\n\r\n--x--".into(),
            "no content-disposition",
        );
    }

    #[test]
    fn only_forms_have_a_boundary() {
        let found = |text: &str| boundary(text).unwrap();
        assert_eq!(found("application/json"), None);
        assert_eq!(found(""), None);
        let quoted = "Multipart/Form-Data; charset=a; Boundary=\"a b\"";
        assert_eq!(found(quoted), Some("a b".into()));
        assert_eq!(found("multipart/form-data;boundary=ab"), Some("ab".into()));
        for text in ["multipart/form-data", "multipart/form-data; boundary="] {
            assert_eq!(boundary(text).unwrap_err().code, "invalid_form");
        }
    }
}
