//! The pages: files of `assets/`, in the binary. Nothing is loaded from elsewhere.

use axum::body::Body;
use axum::http::{Response, StatusCode, header};

/// Content types.
const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// Path, content type, text.
const FILES: &[(&str, &str, &str)] = &[
    ("/", HTML, include_str!("../assets/index.html")),
    (
        "/assets/style.css",
        CSS,
        include_str!("../assets/style.css"),
    ),
    ("/assets/icon.svg", SVG, include_str!("../assets/icon.svg")),
    ("/assets/app.js", JS, include_str!("../assets/app.js")),
    ("/assets/dom.js", JS, include_str!("../assets/dom.js")),
    ("/assets/chart.js", JS, include_str!("../assets/chart.js")),
    ("/assets/runs.js", JS, include_str!("../assets/runs.js")),
    ("/assets/curves.js", JS, include_str!("../assets/curves.js")),
    ("/assets/live.js", JS, include_str!("../assets/live.js")),
    (
        "/assets/timeline.js",
        JS,
        include_str!("../assets/timeline.js"),
    ),
    (
        "/assets/episodes.js",
        JS,
        include_str!("../assets/episodes.js"),
    ),
    (
        "/assets/episode.js",
        JS,
        include_str!("../assets/episode.js"),
    ),
    ("/assets/diff.js", JS, include_str!("../assets/diff.js")),
    ("/assets/step.js", JS, include_str!("../assets/step.js")),
    ("/assets/errors.js", JS, include_str!("../assets/errors.js")),
    (
        "/assets/scaling.js",
        JS,
        include_str!("../assets/scaling.js"),
    ),
];

/// The file at a path; `None` if there is none.
pub(crate) fn file(path: &str) -> Option<Response<Body>> {
    let (_, kind, text) = FILES.iter().find(|(at, _, _)| *at == path)?;
    let built = Response::builder()
        .status(StatusCode::OK)
        .header(header::CONTENT_TYPE, *kind)
        .header(header::CACHE_CONTROL, "no-cache")
        .body(Body::from(*text));
    built.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_loaded_from_elsewhere_and_no_markup_is_made_of_text() {
        for (path, _, text) in FILES {
            let text = text.replace("http://www.w3.org/", "");
            assert!(
                !text.contains("http://") && !text.contains("https://"),
                "{path}"
            );
            for unsafe_word in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "eval(",
                "document.write",
            ] {
                assert!(!text.contains(unsafe_word), "{path}: {unsafe_word}");
            }
        }
    }

    #[test]
    fn every_import_is_served() {
        for (path, _, text) in FILES {
            for import in text.split("from \"./").skip(1) {
                let name = import.split('"').next().unwrap();
                assert!(file(&format!("/assets/{name}")).is_some(), "{path}: {name}");
            }
        }
        assert!(file("/assets/none.js").is_none());
    }
}
