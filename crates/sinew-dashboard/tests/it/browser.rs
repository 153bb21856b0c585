//! The pages in a real browser: drawn without an error, within their own server, on a desk and on a phone.

use crate::chromium::Browser;
use crate::{Served, data, serve};
use serde_json::json;
use sinew_store::StoreReader;
use sinew_types::EpisodeId;
use std::io::Write;
use std::path::Path;

/// Pages by name, with the parameters of a link.
const PAGES: &[(&str, &str)] = &[
    ("runs", ""),
    ("scaling", ""),
    ("curves", "?run=a&also=b"),
    ("live", "?run=a"),
    ("timeline", "?run=a"),
    ("episodes", "?run=a"),
    ("errors", "?run=a"),
    ("step", "?run=a&step=7"),
    ("curves", "?run=a&also=b&seeds=band"),
    ("episodes", "?run=a&text=boxes"),
    ("compare", "?run=a&a=d00000001-e0&b=d00000001-e1&view=words"),
    ("episode", "?run=a&id=d00000000-e0"),
    ("episode", "?run=a&id=d00000000-e0&view=tokens"),
    (
        "episode",
        "?run=a&id=d00000000-e0&view=tokens&color=advantage",
    ),
    ("episode", "?run=a&id=d00000000-e0&view=tokens&color=ratio"),
    ("compare", "?run=a&a=d00000001-e0&b=d00000001-e1"),
];

pub(crate) fn open(folder: &Path, served: &Served) -> Browser {
    let mut browser = Browser::start(folder);
    browser.size(1280, 860);
    browser.go(&served.url);
    browser.until("document.documentElement?.dataset.ready === 'runs'");
    browser
}

pub(crate) fn show(browser: &mut Browser, page: &str, params: &str) {
    browser.eval(&format!(
        "delete document.documentElement.dataset.ready; location.hash = ''; location.hash = '#/{page}{params}'"
    ));
    browser.until(&format!(
        "document.documentElement.dataset.ready === '{page}'"
    ));
}

#[test]
fn every_page_is_drawn_without_errors_or_requests_to_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    data::run(&dir.path().join("runs/a"), 12, 3, 0.0);
    data::run(&dir.path().join("runs/b"), 9, 1, 0.1);
    let served = serve(&dir.path().join("runs"));
    let mut browser = open(dir.path(), &served);
    for width in [1280, 390] {
        browser.size(width, 860);
        for (page, params) in PAGES {
            show(&mut browser, page, params);
            let text = browser.eval("document.getElementById('main').innerText.length");
            assert!(text.as_u64().unwrap() > 60, "{page}: {text}");
            // Tables scroll within their cards; the page does not.
            let wide = browser.eval("document.documentElement.scrollWidth - innerWidth");
            assert!(
                wide.as_i64().unwrap() <= 0,
                "{page} at {width}: {wide} too wide"
            );
        }
    }
    assert!(browser.errors.is_empty(), "{:#?}", browser.errors);
    let own = format!("http://{}/", served.address);
    let fits = |url: &&String| {
        !(url.starts_with(&own) || url.starts_with("data:") || url.starts_with("about:"))
    };
    let elsewhere: Vec<&String> = browser.requests.iter().filter(fits).collect();
    assert!(
        elsewhere.is_empty() && !browser.requests.is_empty(),
        "{elsewhere:?}"
    );
}

#[test]
fn text_of_a_model_is_text_and_an_episode_shows_what_was_recorded() {
    let dir = tempfile::tempdir().unwrap();
    data::run(&dir.path().join("a"), 3, 3, 0.0);
    let served = serve(dir.path());
    let mut browser = open(dir.path(), &served);
    show(&mut browser, "episode", "?run=a&id=d00000001-e0");
    let text = browser.eval("document.getElementById('main').innerText");
    assert!(text.as_str().unwrap().contains("<b>Use the tool.</b>"));
    assert_eq!(
        browser.eval("document.querySelectorAll('.said b').length"),
        0
    );
    // A call is folded, and opens.
    assert_eq!(
        browser.eval("document.querySelector('details').open"),
        false
    );
    browser.eval("document.querySelector('summary').click()");
    assert_eq!(browser.eval("document.querySelector('details').open"), true);
    // A picture that the trace holds is shown, one of another site is named.
    show(&mut browser, "episode", "?run=a&id=d00000000-e0");
    assert_eq!(
        browser.eval("document.querySelectorAll('img.media').length"),
        1
    );
    browser.until("document.querySelector('img.media').naturalWidth === 1");
    assert_eq!(
        browser.eval("document.querySelectorAll('.tree circle').length"),
        7
    );
    // Tokens, by `v`; each token of the model has its log-prob.
    browser.key("v");
    browser.until("document.querySelectorAll('.turn.sampled .tokens span').length > 20");
    browser.eval("document.querySelector('.turn.sampled .tokens span').dispatchEvent(new PointerEvent('pointerover', { bubbles: true }))");
    let ink = browser.eval("document.querySelector('.ink').innerText");
    for part in ["sampled", "log-prob ", "probability", "weights 0"] {
        assert!(ink.as_str().unwrap().contains(part), "{ink}");
    }
    assert!(browser.errors.is_empty(), "{:#?}", browser.errors);
}

#[test]
fn keys_links_theme_and_changes_work() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a");
    data::run(&run, 4, 3, 0.0);
    let served = serve(dir.path());
    let mut browser = open(dir.path(), &served);
    // A link holds the state of its page.
    show(&mut browser, "episodes", "?run=a&success=true&type=shop");
    assert_eq!(
        browser.eval(
            "[...document.querySelectorAll('tbody tr')].every((r) => r.innerText.includes('shop'))"
        ),
        true
    );
    browser.key("j");
    browser.key("j");
    let second = browser.eval("document.querySelectorAll('tbody tr')[1].dataset.id");
    assert_eq!(
        browser.eval("document.querySelector('tr.at').dataset.id"),
        second
    );
    browser.key("Enter");
    browser.until("document.documentElement.dataset.ready === 'episode'");
    assert!(
        browser
            .eval("location.hash")
            .as_str()
            .unwrap()
            .contains(second.as_str().unwrap())
    );
    browser.key("?");
    browser.until("!document.getElementById('overlay').hidden");
    browser.key("Escape");
    browser.until("document.getElementById('overlay').hidden");
    // Dark by the system, and by the switch.
    let background = "getComputedStyle(document.body).backgroundColor";
    let light = browser.eval(background);
    browser.dark(true);
    browser.until("document.documentElement.dataset.theme === 'dark'");
    assert_ne!(browser.eval(background), light);
    browser.key("d");
    browser.until("document.documentElement.dataset.theme === 'light'");
    // A step that the run adds appears by itself.
    show(&mut browser, "errors", "?run=a");
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let mut record: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    record["step"] = 5.into();
    record["failed_cause"] = "engine: it was unplugged".into();
    // The server looks from when the page listens on: lines are added until one is seen.
    for _ in 0..200 {
        let mut file = std::fs::File::options()
            .append(true)
            .open(run.join("metrics.jsonl"))
            .unwrap();
        writeln!(file, "{record}").unwrap();
        let seen = browser.eval("new Promise((done) => { let n = 0; const look = () => document.body.innerText.includes('unplugged') ? done(true) : n++ > 150 ? done(false) : setTimeout(look, 20); look(); })");
        if seen == true {
            assert!(browser.errors.is_empty(), "{:#?}", browser.errors);
            return;
        }
    }
    panic!("the page did not see the step");
}

#[test]
fn the_page_of_an_episode_needs_nothing_else_and_keeps_hostile_text_as_text() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a");
    data::run(&run, 1, 1, 0.0);
    let store = StoreReader::open(&run.join("store")).unwrap();
    let mut trace = store.get(&EpisodeId::new("d00000000-e0")).unwrap().unwrap();
    let evil = "</div></script><script>document.title='owned'</script><img src=https://example.org/x onerror=\"document.title='owned'\">";
    trace.task_kind = evil.into();
    trace.nodes[1].messages[0].content = evil.into();
    trace.nodes[1].messages[0].tool_calls[0].name = evil.into();
    let renderer = sinew_render::byte_renderer().unwrap();
    let page = sinew_view::html(&trace, Ok(&renderer), sinew_view::Limits::default());
    let file = dir.path().join("page.html");
    std::fs::write(&file, page).unwrap();
    let mut browser = Browser::start(dir.path());
    browser.call(
        "Network.emulateNetworkConditions",
        json!({ "offline": true, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0 }),
    );
    browser.size(390, 860);
    browser.go(&format!("file://{}", file.display()));
    browser.until("location.protocol === 'file:' && document.readyState === 'complete'");
    assert_eq!(browser.eval("document.title"), "d00000000-e0");
    let text = browser.eval("document.body.textContent");
    // Type, environment, text, the name of the tool.
    assert_eq!(text.as_str().unwrap().matches(evil).count(), 4, "{text}");
    for (what, count) in [
        ("script", 0),
        ("img", 1),
        ("article", trace.nodes.len()),
        ("details.call", 1),
        (
            "article.sampled .tokens span[title*=log-prob]",
            trace.sampled_tokens(),
        ),
    ] {
        let found = browser.eval(&format!("document.querySelectorAll({what:?}).length"));
        assert_eq!(found, count, "{what}");
    }
    browser.until("document.querySelector('img').naturalWidth === 1");
    // A call is folded, and opens without a script of the page; tokens have their colours.
    assert_eq!(
        browser.eval("document.querySelector('details.call').open"),
        false
    );
    browser.eval("document.querySelector('details.call summary').click()");
    assert_eq!(
        browser.eval("document.querySelector('details.call').open"),
        true
    );
    let colours = "new Set([...document.querySelectorAll('.sampled .tokens span')].map((s) => getComputedStyle(s).backgroundColor)).size";
    assert!(browser.eval(colours).as_u64().unwrap() > 1);
    let wide = browser.eval("document.documentElement.scrollWidth - innerWidth");
    assert!(wide.as_i64().unwrap() <= 0, "{wide}");
    assert!(browser.errors.is_empty(), "{:#?}", browser.errors);
    let own = |url: &&String| {
        !["file:", "data:", "about:"]
            .iter()
            .any(|o| url.starts_with(o))
    };
    let elsewhere: Vec<&String> = browser.requests.iter().filter(own).collect();
    assert!(elsewhere.is_empty(), "{elsewhere:?}");
}
