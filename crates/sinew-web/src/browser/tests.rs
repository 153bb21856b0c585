//! Pages and pools in real Chromium: what they reach, what they keep, what is left of them.

use super::page::{Page, PageFault, SharedSite};
use super::pool::{Lease, Pool, PoolConfig};
use crate::plan::Step;
use crate::site::{Request, Response, Site};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;
use sinew_types::Outcome;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(20);

/// A page with a link, a field and a script.
struct Plain;

impl Site for Plain {
    fn start(&self) -> String {
        "/".into()
    }

    fn begun(&mut self, _prepared: &Value) -> Result<String, String> {
        Ok("look".into())
    }

    fn respond(&mut self, request: &Request) -> Response {
        let tall = "<p style='margin-top:2000px'>far <button>End</button></p>";
        let body = match request.path.as_str() {
            "/" => format!(
                "<title>Plain</title><p>cookie: {}</p><a href=/next>Next</a>{tall}",
                request.cookie
            ),
            "/next" => {
                "<title>Second</title><button onclick=\"alert('hello')\">Warn</button>".into()
            }
            "/loop" => "<script>location.reload()</script>".into(),
            _ => return Response::html(404, "<title>Missing</title>".into()),
        };
        let mut response = Response::html(200, body);
        response
            .headers
            .push(("set-cookie".into(), "seen=yes".into()));
        response
    }

    fn outcome(&self, _done: bool) -> Outcome {
        Outcome::default()
    }

    fn gold(&self) -> Option<Vec<Step>> {
        None
    }
}

fn pool(browsers: usize, pages: usize, episodes: u64, warm: usize) -> Arc<Pool> {
    Pool::new(PoolConfig {
        program: "/usr/bin/chromium".into(),
        browsers,
        pages,
        episodes,
        warm,
        limit: LIMIT,
        wait: LIMIT,
    })
}

async fn plain(pool: &Arc<Pool>) -> Lease {
    let mut lease = pool.page().await.unwrap();
    let site: SharedSite = Arc::new(Mutex::new(Box::new(Plain)));
    lease.page().unwrap().serve(site).await.unwrap();
    lease.page().unwrap().settle(PAUSE).await.unwrap();
    lease
}

async fn shown(page: &Page) -> String {
    page.look().await.unwrap().0.show(4000)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_reaches_its_site_and_nothing_else() {
    let pool = pool(1, 2, 100, 0);
    let mut lease = plain(&pool).await;
    let page = lease.page().unwrap();
    assert!(shown(page).await.contains("[1] link \"Next\""));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let tries = [
        format!("fetch('http://{address}/').then(r => 'reached', () => 'refused')"),
        format!(
            "fetch('http://{address}/', {{ mode: 'no-cors' }}).then(r => 'reached', () => 'refused')"
        ),
        "fetch('http://site.test.example/').then(r => 'reached', () => 'refused')".to_owned(),
        "fetch('http://other.test/').then(r => 'reached', () => 'refused')".to_owned(),
        "fetch('file:///etc/passwd').then(r => 'reached', () => 'refused')".to_owned(),
        format!(
            "new Promise(done => {{ const s = new WebSocket('ws://{address}/'); \
             s.onopen = () => done('reached'); s.onerror = () => done('refused'); }})"
        ),
        format!(
            "new Promise(done => {{ const f = new Image(); f.onload = () => done('reached'); \
             f.onerror = () => done('refused'); f.src = 'http://{address}/x.png'; }})"
        ),
    ];
    for attempt in tries {
        assert_eq!(
            page.evaluate(&attempt).await.unwrap(),
            "refused",
            "{attempt}"
        );
    }
    assert!(page.refused() >= 3, "{}", page.refused());
    assert!(listener.accept().is_err(), "something connected");
    for path in [
        "//other.test/",
        "http://other.test/",
        "javascript:1",
        "file:///etc/passwd",
        "",
    ] {
        // A path that begins with a slash stays one of the site, whatever it looks like.
        match page.open(path).await {
            Err(PageFault::Model(_)) => {}
            other => assert!(path.starts_with("//") && other.is_ok(), "{path}: {other:?}"),
        }
        page.settle(PAUSE).await.unwrap();
        let origin = page.evaluate("location.origin").await.unwrap();
        assert_eq!(origin, "http://site.test", "{path}");
    }
    lease.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_are_new_for_every_episode() {
    let pool = pool(1, 2, 100, 1);
    let mut first = plain(&pool).await;
    let page = first.page().unwrap();
    page.evaluate("localStorage.setItem('a', 'b'); history.pushState({}, '', '/x')")
        .await
        .unwrap();
    page.open("/").await.unwrap();
    page.settle(PAUSE).await.unwrap();
    assert!(shown(page).await.contains("cookie: seen=yes"));
    // At the same time and afterwards: neither cookie nor storage nor history.
    let mut second = plain(&pool).await;
    first.end().await;
    let mut third = plain(&pool).await;
    for lease in [&mut second, &mut third] {
        let page = lease.page().unwrap();
        let text = shown(page).await;
        assert!(text.contains("cookie:") && !text.contains("seen"), "{text}");
        assert_eq!(page.evaluate("localStorage.length").await.unwrap(), 0);
        assert!(matches!(page.back().await, Err(PageFault::Model(_))));
    }
    second.end().await;
    third.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn windows_scroll_dialogs_are_answered_and_pages_that_never_rest_end() {
    let pool = pool(1, 1, 100, 0);
    let mut lease = plain(&pool).await;
    let page = lease.page().unwrap();
    let (tree, _) = page.look().await.unwrap();
    let text = tree.show(4000);
    assert!(
        text.contains("below: scroll") && !text.contains("End"),
        "{text}"
    );
    for _ in 0..5 {
        page.scroll(true).await.unwrap();
    }
    page.settle(PAUSE).await.unwrap();
    let text = shown(page).await;
    assert!(
        text.contains("[1] button \"End\"") && text.contains("above"),
        "{text}"
    );
    page.open("/next").await.unwrap();
    page.settle(PAUSE).await.unwrap();
    let (tree, _) = page.look().await.unwrap();
    page.click(tree.element(1).unwrap()).await.unwrap();
    page.settle(PAUSE).await.unwrap();
    let (_, dialogs) = page.look().await.unwrap();
    assert_eq!(dialogs, ["alert \"hello\""]);
    page.back().await.unwrap();
    page.settle(PAUSE).await.unwrap();
    assert!(shown(page).await.contains("Plain"));
    lease.end().await;
}

/// The first process of a browser inside of its namespaces.
fn inner(lease: &Lease) -> (Pid, OwnedFd) {
    let outer = lease.process().unwrap();
    let children = std::fs::read_to_string(format!("/proc/{outer}/task/{outer}/children")).unwrap();
    let child: i32 = children.split_whitespace().next().unwrap().parse().unwrap();
    let pid = Pid::from_raw(child).unwrap();
    (pid, pidfd_open(pid, PidfdFlags::empty()).unwrap())
}

/// Blocks until a process has ended.
fn ended(process: &OwnedFd) {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    // A signal of another test may interrupt the wait.
    rustix::io::retry_on_intr(|| poll(&mut fds, None)).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browser_that_crashes_is_replaced_and_leaves_no_process() {
    let pool = pool(1, 2, 100, 1);
    let mut lease = plain(&pool).await;
    let (pid, process) = inner(&lease);
    kill_process(pid, Signal::KILL).unwrap();
    ended(&process);
    let page = lease.page().unwrap();
    let failed = page.settle(PAUSE).await;
    assert!(matches!(failed, Err(PageFault::Browser(_))), "{failed:?}");
    lease.end().await;
    let mut next = plain(&pool).await;
    assert!(shown(next.page().unwrap()).await.contains("Next"));
    // A lease that is dropped, and a pool that is, end every process.
    let (_, process) = inner(&next);
    drop(next);
    ended(&process);
    let last = plain(&pool).await;
    let (_, process) = inner(&last);
    let weak = Arc::downgrade(&pool);
    last.end().await;
    drop(pool);
    tokio::task::spawn_blocking(move || ended(&process))
        .await
        .unwrap();
    assert!(weak.upgrade().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_are_limited_and_browsers_retire() {
    let pool = pool(1, 1, 2, 0);
    let first = plain(&pool).await;
    let (_, process) = inner(&first);
    let waiting = tokio::spawn({
        let pool = Arc::clone(&pool);
        async move { plain(&pool).await }
    });
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished());
    first.end().await;
    let second = waiting.await.unwrap();
    second.end().await;
    // It served two episodes.
    tokio::task::spawn_blocking(move || ended(&process))
        .await
        .unwrap();
    plain(&pool).await.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_is_no_browser_is_named() {
    let config = PoolConfig {
        program: "/bin/true".into(),
        browsers: 1,
        pages: 1,
        episodes: 1,
        warm: 0,
        limit: LIMIT,
        wait: LIMIT,
    };
    let error = Pool::new(config).page().await.unwrap_err();
    assert!(error.contains("/bin/true ended at its start"), "{error}");
}
