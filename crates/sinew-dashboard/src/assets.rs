//! The pages: files of `assets/`, in the binary. Nothing is loaded from elsewhere.

use axum::body::Body;
use axum::http::{Response, StatusCode, header};

/// Path, text.
const FILES: &[(&str, &str)] = &[
    ("/", include_str!("../assets/index.html")),
    ("/assets/style.css", include_str!("../assets/style.css")),
    ("/assets/icon.svg", include_str!("../assets/icon.svg")),
    ("/assets/app.js", include_str!("../assets/app.js")),
    ("/assets/dom.js", include_str!("../assets/dom.js")),
    ("/assets/chart.js", include_str!("../assets/chart.js")),
    ("/assets/runs.js", include_str!("../assets/runs.js")),
    ("/assets/curves.js", include_str!("../assets/curves.js")),
    ("/assets/live.js", include_str!("../assets/live.js")),
    ("/assets/timeline.js", include_str!("../assets/timeline.js")),
    ("/assets/episodes.js", include_str!("../assets/episodes.js")),
    ("/assets/episode.js", include_str!("../assets/episode.js")),
    ("/assets/diff.js", include_str!("../assets/diff.js")),
    ("/assets/step.js", include_str!("../assets/step.js")),
    ("/assets/errors.js", include_str!("../assets/errors.js")),
    ("/assets/scaling.js", include_str!("../assets/scaling.js")),
];

/// The file at a path; `None` if there is none.
pub(crate) fn file(path: &str) -> Option<Response<Body>> {
    let (_, text) = FILES.iter().find(|(at, _)| *at == path)?;
    let kind = match path.rsplit_once('.') {
        Some((_, "css")) => "text/css; charset=utf-8",
        Some((_, "js")) => "text/javascript; charset=utf-8",
        Some((_, "svg")) => "image/svg+xml",
        _ => "text/html; charset=utf-8",
    };
    let built = Response::builder()
        .status(StatusCode::OK)
        .header(header::CONTENT_TYPE, kind)
        .header(header::CACHE_CONTROL, "no-cache")
        .body(Body::from(*text));
    built.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_loaded_from_elsewhere_and_no_markup_is_made_of_text() {
        for (path, text) in FILES {
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
        for (path, text) in FILES {
            for import in text.split("from \"./").skip(1) {
                let name = import.split('"').next().unwrap();
                assert!(file(&format!("/assets/{name}")).is_some(), "{path}: {name}");
            }
        }
        assert!(file("/assets/none.js").is_none());
    }

    #[test]
    fn a_page_is_html_and_other_files_are_what_their_names_say() {
        for (path, kind) in [
            ("/", "text/html; charset=utf-8"),
            ("/assets/style.css", "text/css; charset=utf-8"),
            ("/assets/icon.svg", "image/svg+xml"),
            ("/assets/app.js", "text/javascript; charset=utf-8"),
        ] {
            assert_eq!(file(path).unwrap().headers()[header::CONTENT_TYPE], kind);
        }
    }
}
