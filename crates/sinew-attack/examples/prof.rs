use sinew_sandbox::*;
use std::time::{Duration, Instant};
async fn ex(s: &mut dyn Sandbox, p: Program) {
    let r = s
        .exec(ExecRequest {
            program: p,
            stdin: vec![],
            deadline: Duration::from_secs(20),
        })
        .await
        .unwrap();
    assert_eq!(
        r.ending,
        Ending::Exited { code: 0 },
        "{}",
        String::from_utf8_lossy(&r.stderr)
    );
}
fn show(name: &str, mut v: Vec<f64>) {
    v.sort_by(f64::total_cmp);
    let at = |q: f64| v[((v.len() - 1) as f64 * q) as usize];
    println!(
        "{name:12} min {:.3} p10 {:.3} p50 {:.3} p90 {:.3}",
        v[0],
        at(0.1),
        at(0.5),
        at(0.9)
    );
}
fn main() {
    if let Some(c) = spawner_main_if_requested() {
        std::process::exit(c)
    }
    let a: Vec<String> = std::env::args().collect();
    let n: usize = a.get(2).map_or(100, |s| s.parse().unwrap());
    let multi = std::env::var("MULTI").is_ok();
    let rt = if multi {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap()
    } else {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    rt.block_on(async {
        let mut c = ProcessConfig::new(std::env::current_exe().unwrap(), "/usr/bin");
        c.max_live = 6000;
        let mode = a[1].as_str();
        c.warm_python = mode != "true";
        let p = std::sync::Arc::new(ProcessProvider::start(c).unwrap());
        let spec = SandboxSpec::default();
        let py = || Program::Python("print(1)".into());
        let tr = || Program::Argv(vec!["/bin/true".into()]);
        let (mut mk, mut run, mut all, mut des) = (vec![], vec![], vec![], vec![]);
        if mode == "rate" || mode == "ratetrue" {
            use futures::StreamExt;
            let b = Instant::now();
            let lanes = std::env::var("LANES").map_or(8, |s| s.parse().unwrap());
            futures::stream::iter(0..n)
                .map(|_| async {
                    let mut s = p.acquire(&spec).await.unwrap();
                    ex(s.as_mut(), if mode == "rate" { py() } else { tr() }).await;
                    s.destroy().await.unwrap();
                })
                .buffer_unordered(lanes)
                .collect::<Vec<()>>()
                .await;
            println!("{} per s", n as f64 / b.elapsed().as_secs_f64());
            return;
        }
        if mode == "next" {
            let mut s = p.acquire(&spec).await.unwrap();
            for _ in 0..n {
                tokio::time::sleep(Duration::from_millis(20)).await;
                let t = Instant::now();
                ex(s.as_mut(), py()).await;
                run.push(t.elapsed().as_secs_f64() * 1e3);
            }
            s.destroy().await.unwrap();
            show("next", run);
            return;
        }
        for _ in 0..n {
            let t = Instant::now();
            let mut s = p.acquire(&spec).await.unwrap();
            mk.push(t.elapsed().as_secs_f64() * 1e3);
            if mode == "prewarmed" {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let r = Instant::now();
            ex(s.as_mut(), if mode == "true" { tr() } else { py() }).await;
            run.push(r.elapsed().as_secs_f64() * 1e3);
            all.push(t.elapsed().as_secs_f64() * 1e3);
            let d = Instant::now();
            s.destroy().await.unwrap();
            des.push(d.elapsed().as_secs_f64() * 1e3);
        }
        show("acquire", mk);
        show("exec", run);
        show("all", all);
        show("destroy", des);
    });
}
