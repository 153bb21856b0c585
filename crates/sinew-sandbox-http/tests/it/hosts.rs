//! One provider over several real servers, of which some die, drain or come back.

use sinew_sandbox::{
    ExecRequest, ProcessConfig, ProcessProvider, Program, Sandbox, SandboxError, SandboxProvider,
    SandboxSpec,
};
use sinew_sandbox_http::client::{Finder, RemoteConfig, RemoteProvider};
use sinew_sandbox_http::{Bounds, Service, Tokens, serve};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

const TOKEN: &str = "ann-0123456789abcdef";
/// Time in which what must happen does; none is waited for.
const LONG: Duration = Duration::from_secs(60);

/// Folder of [`Host::folder`] inside sandboxes.
const INSIDE: &str = "/volumes/go";

/// A server with sandboxes of the process level.
struct Host {
    service: Arc<Service>,
    address: SocketAddr,
    task: JoinHandle<()>,
    /// A folder that its sandboxes see.
    folder: tempfile::TempDir,
}

impl Host {
    async fn start(at: SocketAddr, sandboxes: usize, price: Option<f64>) -> Self {
        let bounds = Bounds {
            sandboxes,
            ..Bounds::default()
        };
        let tokens = Tokens::parse(&format!("ann:{TOKEN}")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut config = ProcessConfig::new("");
        config.shows.push((folder.path().to_owned(), INSIDE.into()));
        let provider: Arc<dyn SandboxProvider> = Arc::new(ProcessProvider::start(config).unwrap());
        let service = Service::new(vec![provider], tokens, bounds, None).with_price(price);
        let service = Arc::new(service);
        let listener = TcpListener::bind(at).await.unwrap();
        let address = listener.local_addr().unwrap();
        let own = Arc::clone(&service);
        let task = tokio::spawn(async move {
            serve(listener, own, std::future::pending()).await.unwrap();
        });
        Self {
            service,
            address,
            task,
            folder,
        }
    }

    async fn new(sandboxes: usize, price: Option<f64>) -> Self {
        Self::start(SocketAddr::from(([127, 0, 0, 1], 0)), sandboxes, price).await
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Its connections are cut and its port is closed, as at the end of its host.
    async fn die(self) -> SocketAddr {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
        self.service.close().await;
        self.address
    }

    fn live(&self) -> usize {
        self.service.live().0
    }
}

fn config(servers: Vec<String>, finder: Option<Finder>) -> RemoteConfig {
    RemoteConfig {
        servers,
        token: TOKEN.into(),
        level: "process",
        image: None,
        max_live: 64,
        finder,
    }
}

fn connect(hosts: &[&Host]) -> RemoteProvider {
    let servers = hosts.iter().map(|h| h.url()).collect();
    RemoteProvider::connect(config(servers, None)).unwrap()
}

fn shell(script: &str) -> ExecRequest {
    ExecRequest::new(Program::Shell(script.into()), LONG)
}

async fn some(remote: &RemoteProvider, count: usize) -> Vec<Box<dyn Sandbox>> {
    let spec = SandboxSpec::default();
    let mut all = Vec::new();
    for _ in 0..count {
        all.push(remote.acquire(&spec).await.unwrap());
    }
    all
}

/// Asks again until an answer comes.
async fn until<T>(mut ask: impl FnMut() -> Option<T>) -> T {
    let asked = async {
        loop {
            match ask() {
                Some(answer) => return answer,
                None => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    tokio::time::timeout(LONG, asked).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandboxes_go_where_room_is_and_cheap_hosts_get_more() {
    let (small, large) = (Host::new(2, None).await, Host::new(6, None).await);
    let remote = connect(&[&small, &large]);
    let held = some(&remote, 8).await;
    assert_eq!((small.live(), large.live()), (2, 6));
    drop(held);
    let (dear, cheap) = (Host::new(8, Some(3.0)).await, Host::new(8, Some(1.0)).await);
    let remote = connect(&[&dear, &cheap]);
    let held = some(&remote, 6).await;
    assert!(cheap.live() > dear.live(), "{}", cheap.live());
    let more = some(&remote, 10).await;
    assert_eq!((dear.live(), cheap.live()), (8, 8));
    drop((held, more));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_host_fails_its_own_sandboxes_and_the_others_take_over() {
    let (first, second) = (Host::new(4, None).await, Host::new(4, None).await);
    let remote = Arc::new(connect(&[&first, &second]));
    let held = some(&remote, 8).await;
    let mut running = Vec::new();
    for mut sandbox in held {
        running.push(tokio::spawn(async move {
            let waits = format!("while [ ! -e {INSIDE}/go ]; do sleep 0.05; done");
            let result = sandbox.exec(shell(&waits)).await;
            (result, sandbox)
        }));
    }
    // Its requests are on their way or run: none can have ended.
    let address = first.die().await;
    std::fs::write(second.folder.path().join("go"), "").unwrap();
    let (mut lost, mut kept) = (0, Vec::new());
    for task in running {
        let (result, sandbox) = task.await.unwrap();
        match result {
            Err(SandboxError::HostLost { host, .. }) => {
                assert!(host.contains(&address.port().to_string()), "{host}");
                assert!(sandbox.is_dead());
                lost += 1;
            }
            Ok(_) => kept.push(sandbox),
            Err(e) => panic!("another failure: {e}"),
        }
    }
    assert_eq!((lost, kept.len()), (4, 4));
    drop(kept);
    // Episodes that run again find room on the host that is left.
    let again = some(&remote, 4).await;
    assert_eq!(second.live(), 4);
    let left_out = until(|| remote.degradations().first().cloned()).await;
    assert!(left_out.contains(&address.port().to_string()), "{left_out}");
    // The host comes back, without what it had, and gets the next ones.
    let back = Host::start(address, 4, None).await;
    let more = some(&remote, 4).await;
    assert_eq!((second.live(), back.live()), (4, 4));
    drop((again, more));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_host_keeps_what_it_has_and_gets_no_more() {
    let (first, second) = (Host::new(4, None).await, Host::new(4, None).await);
    let remote = connect(&[&first, &second]);
    let mut held = some(&remote, 2).await;
    assert_eq!((first.live(), second.live()), (1, 1));
    first.service.drain();
    let more = some(&remote, 3).await;
    assert_eq!((first.live(), second.live()), (1, 4));
    for sandbox in &mut held {
        assert!(sandbox.exec(shell("true")).await.is_ok());
    }
    drop(more);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hosts_of_a_registry_come_and_go() {
    let (first, second) = (Host::new(2, None).await, Host::new(2, None).await);
    let known = Arc::new(Mutex::new(vec![first.url()]));
    let own = Arc::clone(&known);
    let finder: Finder = Arc::new(move || Ok(own.lock().unwrap().clone()));
    let remote = RemoteProvider::connect(config(Vec::new(), Some(finder))).unwrap();
    let held = some(&remote, 2).await;
    assert_eq!(first.live(), 2);
    // The first one leaves the registry, and a second one with an address that is none comes.
    *known.lock().unwrap() = vec!["nonsense".into(), second.url()];
    let more = some(&remote, 2).await;
    assert_eq!((first.live(), second.live()), (2, 2));
    drop((held, more));
}

/// An owner that was killed knows no roles after its start, and hosts that answer keep their sandboxes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registry_that_forgot_its_hosts_or_is_away_takes_none_from_a_run() {
    let host = Host::new(2, None).await;
    let listed = Arc::new(Mutex::new(Ok(vec![host.url()])));
    let asked = Arc::new(Mutex::new(0));
    let (own, count) = (Arc::clone(&listed), Arc::clone(&asked));
    let finder: Finder = Arc::new(move || {
        *count.lock().unwrap() += 1;
        own.lock().unwrap().clone()
    });
    let remote = RemoteProvider::connect(config(Vec::new(), Some(finder))).unwrap();
    for answer in [Ok(Vec::new()), Err("nobody is there".to_owned())] {
        let is_away = answer.is_err();
        *listed.lock().unwrap() = answer;
        let before = *asked.lock().unwrap();
        while *asked.lock().unwrap() == before {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(some(&remote, 1).await.len(), 1);
        if is_away {
            // The answer is noted after it was given.
            while remote.degradations().is_empty() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let named = remote.degradations().join(" ");
            assert!(named.contains("sandbox.owner: nobody is there"), "{named}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_host_that_is_away_is_left_out_and_a_wrong_one_is_refused() {
    let (first, second) = (Host::new(2, None).await, Host::new(2, None).await);
    let (url, gone) = (first.url(), second.url());
    second.die().await;
    let servers = vec![gone.clone(), url.clone()];
    let remote = RemoteProvider::connect(config(servers.clone(), None)).unwrap();
    assert_eq!(some(&remote, 2).await.len(), 2);
    let mut wrong = config(servers, None);
    wrong.token = "another-0123456789".into();
    let refused = RemoteProvider::connect(wrong).unwrap_err().to_string();
    assert!(
        refused.contains(&url) && refused.contains("server_key_env"),
        "{refused}"
    );
    let nobody = RemoteProvider::connect(config(vec![gone.clone()], None));
    let refused = nobody.unwrap_err().to_string();
    assert!(refused.contains(&gone), "{refused}");
}
