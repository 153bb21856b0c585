//! Programs that stand for the Python of the ranks.

use super::*;

/// A script in the place of Python.
fn python(dir: &Path, script: &str) -> PathBuf {
    let path = dir.join("python");
    crate::testing::program(&path, script);
    path
}

/// Options of two ranks that run a script. Rank 0 listens after half a second at most.
fn options(dir: &Path, script: &str) -> RankOptions {
    let ready = r#"if [ $RANK = 0 ]; then
        echo '{"url": "http://127.0.0.1:1"}' >ready.part
        mv ready.part $SINEW_TORCH_READY
    fi"#;
    let script = format!("{script}\n{ready}\nexec cat >/dev/null");
    RankOptions {
        scratch: Some(dir.to_owned()),
        ready: Duration::from_secs(60),
        threads: Some(2),
        ..RankOptions::new(python(dir, &script), 2, dir.join("logs"))
    }
}

fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| {
        let state = rest.trim_start().chars().next();
        state.is_some_and(|state| state != 'Z')
    })
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn ranks_get_their_places_and_end_with_their_group() {
    let dir = tempfile::tempdir().unwrap();
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE >&2\n\
                  echo $MASTER_ADDR $OMP_NUM_THREADS \"$@\" >&2\n\
                  stat -c %a . sinew_torch/__init__.py $SINEW_TORCH_TOKEN_FILE >&2";
    let group = RankGroup::start(&options(dir.path(), script)).unwrap();
    assert_eq!(group.server().url, "http://127.0.0.1:1");
    assert_eq!(group.server().token.len(), 2 * TOKEN_BYTES);
    assert_eq!(group.check(), None);
    let pids = group.pids();
    assert!(pids.iter().all(|&pid| is_running(pid)));
    let log = dir.path().join("logs/rank-1.log");
    eventually("a log of rank 1", || {
        fs::read_to_string(&log).unwrap().lines().count() == 5
    });
    let text = fs::read_to_string(&log).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[..2], ["1/2 1/2", "127.0.0.1 2 -m sinew_torch"]);
    assert_eq!((lines[2], lines[4]), ("700", "600"));
    drop(group);
    assert!(!pids.iter().any(|&pid| is_running(pid)));
    // Nothing is left but the script and the logs.
    let names = fs::read_dir(dir.path()).unwrap();
    let mut names: Vec<_> = names.map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["logs", "python"]);
}

#[test]
fn a_rank_that_ends_at_the_start_is_reported_with_its_last_words() {
    let dir = tempfile::tempdir().unwrap();
    let script =
        "[ $RANK = 1 ] && { echo no module named torch >&2; exit 3; }; exec cat >/dev/null";
    let error = RankGroup::start(&options(dir.path(), script)).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("rank 1 of the torch trainer ended: exit status: 3"),
        "{text}"
    );
    assert!(text.contains("    no module named torch"), "{text}");
}

#[test]
fn the_first_rank_that_ends_is_remembered_and_the_others_are_killed() {
    let dir = tempfile::tempdir().unwrap();
    let group = RankGroup::start(&options(dir.path(), "")).unwrap();
    let pids = group.pids();
    let killed = Command::new("kill")
        .args(["-9", &pids[1].to_string()])
        .status();
    assert!(killed.unwrap().success());
    eventually("an end that is seen", || group.check().is_some());
    eventually("an end of the other rank", || !is_running(pids[0]));
    let ended = group.check().unwrap();
    assert_eq!(ended.rank, 1);
    assert_eq!(
        ended.to_string(),
        "signal: 9 (SIGKILL); its standard error is empty"
    );
}

#[test]
fn a_server_that_never_listens_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(dir.path(), "echo loading >&2; exec cat >/dev/null");
    options.ready = Duration::from_millis(500);
    let text = RankGroup::start(&options).unwrap_err().to_string();
    assert!(
        text.contains("the server does not listen after 0 s"),
        "{text}"
    );
    options.ranks = 0;
    assert!(RankGroup::start(&options).is_err());
}

#[test]
fn programs_are_found_from_another_folder() {
    assert_eq!(program(Path::new("python3")).unwrap(), Path::new("python3"));
    let own = program(Path::new("venv/bin/python")).unwrap();
    assert!(own.is_absolute() && own.ends_with("venv/bin/python"));
}
