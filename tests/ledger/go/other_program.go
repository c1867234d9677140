// A Go program that shares a ledger with Holdfast: it follows the specification and knows nothing else.
//
//	other_program append   PROOF AGENT COUNT  appends COUNT events, each at the sequence it has seen
//	other_program careless PROOF AGENT COUNT  the same without taking the lock: a planted bug
//	other_program hold     PROOF AGENT        acquires the ledger's lock, says so, releases it when told
//	other_program claimed  PROOF NODE         prints the owner of the node, by replaying all events
//
// It needs only the standard library, and a file system with exclusive creation and rename.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

const (
	lockFileName   = "ledger.lock"
	pollInterval   = 10 * time.Millisecond
	defaultTimeout = 5 * time.Second
	testTimeout    = 120 * time.Second // for tests on a busy machine
)

var careless = false

var errSequenceMismatch = errors.New("sequence mismatch")

type event map[string]any

// acquire creates the lock file; while the file exists, somebody else holds the lock.
func acquire(ledger, agent string, timeout time.Duration) error {
	path := filepath.Join(ledger, lockFileName)
	deadline := time.Now().Add(timeout)
	for {
		file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0600)
		if err == nil {
			said := json.NewEncoder(file).Encode(map[string]any{
				"agent_id":    agent,
				"acquired_at": time.Now().UTC().Format(time.RFC3339),
			})
			if closed := file.Close(); said == nil {
				said = closed
			}
			return said
		}
		if !errors.Is(err, os.ErrExist) {
			return err
		}
		if time.Now().After(deadline) {
			return errors.New("timeout waiting for lock")
		}
		time.Sleep(pollInterval)
	}
}

func release(ledger string) error {
	return os.Remove(filepath.Join(ledger, lockFileName))
}

// countEvents returns the current sequence, which the specification defines as the number of files.
func countEvents(ledger string) (int, error) {
	found, err := filepath.Glob(filepath.Join(ledger, "event-*.json"))
	return len(found), err
}

// appendIfSequence appends an event if the ledger is still at `expected`: temporary file, fsync, rename.
func appendIfSequence(ledger, agent string, made event, expected int) (err error) {
	if !careless {
		if err = acquire(ledger, agent, testTimeout); err != nil {
			return err
		}
		defer func() {
			if released := release(ledger); err == nil {
				err = released
			}
		}()
	}
	sequence, err := countEvents(ledger)
	if err != nil {
		return err
	}
	if sequence != expected {
		return errSequenceMismatch
	}
	content, err := json.MarshalIndent(made, "", "  ")
	if err != nil {
		return err
	}
	draft, err := os.CreateTemp(ledger, ".event-*.tmp")
	if err != nil {
		return err
	}
	if _, err = draft.Write(content); err == nil {
		err = draft.Sync()
	}
	if closed := draft.Close(); err == nil {
		err = closed
	}
	if careless {
		time.Sleep(5 * time.Millisecond) // so that both programs append at the same time, on any machine
	}
	if err != nil {
		return err
	}
	return os.Rename(draft.Name(), filepath.Join(ledger, fmt.Sprintf("event-%06d.json", expected+1)))
}

// safeAppend reads the sequence and appends, and retries after each mismatch. It returns the number of retries.
func safeAppend(ledger, agent string, made event) (int, error) {
	for retries := 0; retries < 10000; retries++ {
		sequence, err := countEvents(ledger)
		if err != nil {
			return retries, err
		}
		err = appendIfSequence(ledger, agent, made, sequence)
		if !errors.Is(err, errSequenceMismatch) {
			return retries, err
		}
	}
	return 10000, errors.New("max retries exceeded")
}

func appendMany(ledger, agent string, count int) error {
	mismatches := 0
	for number := 0; number < count; number++ {
		retries, err := safeAppend(ledger, agent, event{
			"type":      "from_go",
			"timestamp": time.Now().UTC().Format(time.RFC3339Nano),
			"agent":     agent,
			"number":    number,
		})
		if err != nil {
			return err
		}
		mismatches += retries
	}
	fmt.Println(mismatches)
	return nil
}

func hold(ledger, agent string) error {
	if err := acquire(ledger, agent, defaultTimeout); err != nil {
		return err
	}
	fmt.Println("held")
	bufio.NewReader(os.Stdin).ReadString('\n')
	return release(ledger)
}

// claimed replays all events and returns the owner of the node, which is empty if the claim has expired.
func claimed(ledger, node string) (string, error) {
	count, err := countEvents(ledger)
	if err != nil {
		return "", err
	}
	owner, expires := "", time.Time{}
	for number := 1; number <= count; number++ {
		content, err := os.ReadFile(filepath.Join(ledger, fmt.Sprintf("event-%06d.json", number)))
		if err != nil {
			return "", err
		}
		var seen struct {
			Type      string    `json:"type"`
			Node      string    `json:"node_id"`
			Owner     string    `json:"owner"`
			ExpiresAt time.Time `json:"expires_at"`
		}
		if err := json.Unmarshal(content, &seen); err != nil {
			return "", fmt.Errorf("event %d: %w", number, err)
		}
		if seen.Node != node {
			continue
		}
		switch seen.Type {
		case "lock_acquired":
			owner, expires = seen.Owner, seen.ExpiresAt
		case "lock_released", "lock_reaped":
			owner = ""
		}
	}
	if !time.Now().Before(expires) {
		owner = ""
	}
	return owner, nil
}

func run(arguments []string) error {
	if len(arguments) < 3 {
		return errors.New("usage: other_program append|careless|hold|claimed PROOF AGENT|NODE [COUNT]")
	}
	ledger := filepath.Join(arguments[1], "ledger")
	switch arguments[0] {
	case "append", "careless":
		careless = arguments[0] == "careless"
		count, err := strconv.Atoi(arguments[len(arguments)-1])
		if err != nil {
			return err
		}
		return appendMany(ledger, arguments[2], count)
	case "hold":
		return hold(ledger, arguments[2])
	case "claimed":
		owner, err := claimed(ledger, arguments[2])
		fmt.Println(owner)
		return err
	}
	return fmt.Errorf("unknown command %q", arguments[0])
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
