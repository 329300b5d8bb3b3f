// A program that holds franz-go clients for the tests; see ../programs.py for the lines it reads.
package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const patience = 30 * time.Second

type word = []byte // nil is null

// An object of the tests: a producer or a consumer.
type object struct {
	client *kgo.Client
	group  string
	id     string

	lock     sync.Mutex // guards the three below: callbacks of the client change them
	owned    map[string]map[int32]bool
	position map[string]map[int32]kgo.EpochOffset
	manual   map[string][]int32
}

var (
	lock    sync.Mutex // guards the two below, and standard output
	objects = map[int]*object{}
	last    int
)

func main() {
	lines := bufio.NewReaderSize(os.Stdin, 1<<20)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			return
		}
		parts := strings.Split(strings.TrimSuffix(line, "\n"), " ")
		var words []word
		for _, each := range parts[3:] {
			if each == "-" {
				words = append(words, nil)
				continue
			}
			data, err := base64.StdEncoding.DecodeString(each[1:])
			if err != nil {
				panic(err)
			}
			if data == nil {
				data = word{}
			}
			words = append(words, data)
		}
		go answer(parts[0], parts[1], number(word(parts[2])), words)
	}
}

func answer(call, method string, target int, words []word) {
	found, err := run(method, target, words)
	status := "ok"
	if err != nil {
		status, found = "error", []word{word(err.Error())}
	}
	text := call + " " + status
	for _, each := range found {
		if each == nil {
			text += " -"
		} else {
			text += " =" + base64.StdEncoding.EncodeToString(each)
		}
	}
	lock.Lock()
	defer lock.Unlock()
	fmt.Println(text)
}

func number(text word) int {
	value, err := strconv.Atoi(string(text))
	if err != nil {
		panic(err)
	}
	return value
}

func texted(value any) word { return word(fmt.Sprint(value)) }

func run(method string, target int, words []word) ([]word, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	lock.Lock()
	self := objects[target]
	lock.Unlock()
	switch method {
	case "producer":
		return producer(ctx, words)
	case "consumer":
		return consumer(words)
	case "admin":
		return admin(ctx, words)
	case "flush":
		return nil, self.flush(ctx, words)
	case "begin":
		return nil, self.client.BeginTransaction()
	case "end":
		how := kgo.TryAbort
		if string(words[0]) == "commit" {
			how = kgo.TryCommit
		}
		return nil, self.client.EndTransaction(ctx, how)
	case "offsets":
		return nil, self.offsets(ctx, words)
	case "assign":
		return nil, self.assign(words)
	case "offset_at":
		return self.offsetAt(ctx, words)
	case "poll":
		return self.poll(words)
	case "assignment":
		return self.assignment(), nil
	case "commit":
		return nil, self.commit(ctx)
	case "committed":
		return self.committed(ctx, words)
	case "close":
		self.client.Close()
		return nil, nil
	}
	return nil, errors.New("no method " + method)
}

func kept(self *object) []word {
	lock.Lock()
	defer lock.Unlock()
	last++
	objects[last] = self
	return []word{texted(last)}
}

// ---- producers ----

func producer(ctx context.Context, words []word) ([]word, error) {
	codec := map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
		"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	}[string(words[1])]
	options := []kgo.Opt{
		kgo.SeedBrokers(string(words[0])), kgo.ProducerBatchCompression(codec),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerLinger(5 * time.Millisecond),
		kgo.ProducerBatchMaxBytes(int32(number(words[5]))),
		kgo.AllowAutoTopicCreation(), kgo.UnknownTopicRetries(20),
	}
	id := string(words[4])
	if words[4] != nil {
		options = append(options, kgo.TransactionalID(id))
	} else if number(words[3]) == 0 {
		acks := map[string]kgo.Acks{"0": kgo.NoAck(), "1": kgo.LeaderAck(), "-1": kgo.AllISRAcks()}
		options = append(options, kgo.RequiredAcks(acks[string(words[2])]), kgo.DisableIdempotentWrite())
	}
	client, err := kgo.NewClient(options...)
	if err != nil {
		return nil, err
	}
	if words[4] != nil { // the id is taken from an older producer now, not at the first record
		if _, _, err := client.ProducerID(ctx); err != nil {
			return nil, err
		}
	}
	return kept(&object{client: client, id: id}), nil
}

func (self *object) flush(ctx context.Context, words []word) error {
	var records []*kgo.Record
	for len(words) > 0 {
		count := number(words[5])
		each := &kgo.Record{
			Topic: string(words[0]), Partition: int32(number(words[1])),
			Timestamp: time.UnixMilli(int64(number(words[2]))), Value: words[3], Key: words[4],
		}
		words = words[6:]
		for ; count > 0; count-- {
			each.Headers = append(each.Headers, kgo.RecordHeader{Key: string(words[0]), Value: words[1]})
			words = words[2:]
		}
		records = append(records, each)
	}
	return self.client.ProduceSync(ctx, records...).FirstErr()
}

// Add an offset of a group to the transaction, as a GroupTransactSession does.
func (self *object) offsets(ctx context.Context, words []word) error {
	lock.Lock()
	reader := objects[number(words[3])]
	lock.Unlock()
	pid, epoch, err := self.client.ProducerID(ctx)
	if err != nil {
		return err
	}
	add := kmsg.NewPtrAddOffsetsToTxnRequest()
	add.TransactionalID, add.ProducerID, add.ProducerEpoch, add.Group = self.id, pid, epoch, reader.group
	added, err := add.RequestWith(ctx, self.client)
	if err != nil {
		return err
	}
	if err := kerr.ErrorForCode(added.ErrorCode); err != nil {
		return err
	}
	ask := kmsg.NewPtrTxnOffsetCommitRequest()
	ask.TransactionalID, ask.ProducerID, ask.ProducerEpoch, ask.Group = self.id, pid, epoch, reader.group
	ask.MemberID, ask.Generation = reader.client.GroupMetadata()
	topic := kmsg.NewTxnOffsetCommitRequestTopic()
	partition := kmsg.NewTxnOffsetCommitRequestTopicPartition()
	partition.Partition, partition.Offset = int32(number(words[1])), int64(number(words[2]))
	topic.Topic, topic.Partitions = string(words[0]), append(topic.Partitions, partition)
	ask.Topics = append(ask.Topics, topic)
	done, err := ask.RequestWith(ctx, self.client)
	if err != nil {
		return err
	}
	return kerr.ErrorForCode(done.Topics[0].Partitions[0].ErrorCode)
}

// ---- consumers ----

func consumer(words []word) ([]word, error) {
	self := &object{
		group: string(words[1]), owned: map[string]map[int32]bool{},
		position: map[string]map[int32]kgo.EpochOffset{},
	}
	start := kgo.NewOffset().AtStart()
	if string(words[5]) == "latest" {
		start = kgo.NewOffset().AtEnd()
	}
	options := []kgo.Opt{
		kgo.SeedBrokers(string(words[0])), kgo.FetchMaxWait(100 * time.Millisecond),
		kgo.ConsumeResetOffset(start), kgo.MetadataMinAge(100 * time.Millisecond),
	}
	if string(words[4]) == "read_committed" {
		options = append(options, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	}
	if words[1] != nil {
		balancer := map[string]kgo.GroupBalancer{
			"range": kgo.RangeBalancer(), "roundrobin": kgo.RoundRobinBalancer(),
			"sticky": kgo.StickyBalancer(), "cooperative-sticky": kgo.CooperativeStickyBalancer(),
		}[string(words[2])]
		options = append(options,
			kgo.ConsumerGroup(self.group), kgo.Balancers(balancer), kgo.DisableAutoCommit(),
			kgo.HeartbeatInterval(200*time.Millisecond), kgo.SessionTimeout(10*time.Second),
			kgo.OnPartitionsAssigned(self.assigned), kgo.OnPartitionsRevoked(self.revoked),
			kgo.OnPartitionsLost(self.revoked))
		if words[3] != nil {
			options = append(options, kgo.InstanceID(string(words[3])))
		}
		for _, topic := range words[6:] {
			options = append(options, kgo.ConsumeTopics(string(topic)))
		}
	}
	client, err := kgo.NewClient(options...)
	if err != nil {
		return nil, err
	}
	self.client = client
	return kept(self), nil
}

func (self *object) assigned(_ context.Context, _ *kgo.Client, places map[string][]int32) {
	self.lock.Lock()
	defer self.lock.Unlock()
	for topic, partitions := range places {
		for _, each := range partitions {
			if self.owned[topic] == nil {
				self.owned[topic] = map[int32]bool{}
			}
			self.owned[topic][each] = true
		}
	}
}

func (self *object) revoked(_ context.Context, _ *kgo.Client, places map[string][]int32) {
	self.lock.Lock()
	defer self.lock.Unlock()
	for topic, partitions := range places {
		for _, each := range partitions {
			delete(self.owned[topic], each)
			delete(self.position[topic], each)
		}
	}
}

func (self *object) assign(words []word) error {
	topic, partition, at := string(words[0]), int32(number(words[1])), string(words[2])
	offset := kgo.NewOffset()
	switch at {
	case "start":
		offset = offset.AtStart()
	case "end":
		found, err := kadm.NewClient(self.client).ListEndOffsets(context.Background(), topic)
		if err != nil {
			return err
		}
		end, _ := found.Lookup(topic, partition)
		offset = offset.At(end.Offset)
	default:
		offset = offset.At(int64(number(words[2])))
	}
	self.client.RemoveConsumePartitions(self.manual)
	self.manual = map[string][]int32{topic: {partition}}
	self.client.AddConsumePartitions(map[string]map[int32]kgo.Offset{topic: {partition: offset}})
	return nil
}

func (self *object) offsetAt(ctx context.Context, words []word) ([]word, error) {
	topic, partition, when := string(words[0]), int32(number(words[1])), int64(number(words[2]))
	found, err := kadm.NewClient(self.client).ListOffsetsAfterMilli(ctx, when, topic)
	if err != nil {
		return nil, err
	}
	// A partition without such a record has the end offset here, and -1 as the time.
	each, _ := found.Lookup(topic, partition)
	if each.Err != nil || each.Timestamp < 0 {
		return []word{nil}, each.Err
	}
	return []word{texted(each.Offset)}, nil
}

func (self *object) poll(words []word) ([]word, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(number(words[0]))*time.Millisecond)
	defer cancel()
	fetches := self.client.PollFetches(ctx)
	for _, each := range fetches.Errors() {
		if !errors.Is(each.Err, context.DeadlineExceeded) {
			return nil, each.Err
		}
	}
	var found []word
	self.lock.Lock()
	defer self.lock.Unlock()
	for _, each := range fetches.Records() {
		found = append(found, word(each.Topic), texted(each.Partition), texted(each.Offset),
			texted(each.Timestamp.UnixMilli()), each.Value, each.Key, texted(len(each.Headers)))
		for _, header := range each.Headers {
			found = append(found, word(header.Key), header.Value)
		}
		if self.position[each.Topic] == nil {
			self.position[each.Topic] = map[int32]kgo.EpochOffset{}
		}
		self.position[each.Topic][each.Partition] = kgo.EpochOffset{Epoch: each.LeaderEpoch, Offset: each.Offset + 1}
	}
	return found, nil
}

func (self *object) assignment() []word {
	found := []word{}
	self.lock.Lock()
	defer self.lock.Unlock()
	for topic, partitions := range self.owned {
		for each := range partitions {
			found = append(found, word(topic), texted(each))
		}
	}
	return found
}

func (self *object) commit(ctx context.Context) error {
	self.lock.Lock()
	wanted := map[string]map[int32]kgo.EpochOffset{}
	for topic, partitions := range self.position {
		wanted[topic] = map[int32]kgo.EpochOffset{}
		for partition, each := range partitions {
			wanted[topic][partition] = each
		}
	}
	self.lock.Unlock()
	var failed error
	self.client.CommitOffsetsSync(ctx, wanted,
		func(_ *kgo.Client, _ *kmsg.OffsetCommitRequest, answer *kmsg.OffsetCommitResponse, err error) {
			failed = err
			if err != nil {
				return
			}
			for _, topic := range answer.Topics {
				for _, each := range topic.Partitions {
					if failed == nil {
						failed = kerr.ErrorForCode(each.ErrorCode)
					}
				}
			}
		})
	return failed
}

func (self *object) committed(ctx context.Context, words []word) ([]word, error) {
	found, err := kadm.NewClient(self.client).FetchOffsets(ctx, self.group)
	if err != nil {
		return nil, err
	}
	each, there := found.Lookup(string(words[0]), int32(number(words[1])))
	if !there || each.Err != nil || each.At < 0 {
		return []word{nil}, each.Err
	}
	return []word{texted(each.At)}, nil
}

// ---- administration ----

func admin(ctx context.Context, words []word) ([]word, error) {
	client, err := kgo.NewClient(kgo.SeedBrokers(string(words[0])))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	kafka := kadm.NewClient(client)
	text := func(n int) string { return string(words[n]) }
	switch text(1) {
	case "create":
		_, err := kafka.CreateTopic(ctx, int32(number(words[3])), 1, nil, text(2))
		return nil, err
	case "grow":
		done, err := kafka.UpdatePartitions(ctx, number(words[3]), text(2))
		if err == nil {
			err = done.Error()
		}
		return nil, err
	case "topics":
		found, err := kafka.ListTopics(ctx)
		var names []word
		for _, each := range found.Sorted() {
			names = append(names, word(each.Topic), texted(len(each.Partitions)))
		}
		return names, err
	case "configure":
		value := text(4)
		done, err := kafka.AlterTopicConfigs(ctx, []kadm.AlterConfig{{Op: kadm.SetConfig, Name: text(3), Value: &value}}, text(2))
		if err == nil {
			err = done[0].Err
		}
		return nil, err
	case "trim":
		wanted := kadm.Offsets{}
		wanted.AddOffset(text(2), int32(number(words[3])), int64(number(words[4])), -1)
		done, err := kafka.DeleteRecords(ctx, wanted)
		if err == nil {
			err = done.Error()
		}
		return nil, err
	case "groups":
		found, err := kafka.ListGroups(ctx)
		var names []word
		for _, each := range found.Groups() {
			names = append(names, word(each))
		}
		return names, err
	case "offsets":
		wanted := kadm.Offsets{}
		wanted.AddOffset(text(3), int32(number(words[4])), int64(number(words[5])), -1)
		done, err := kafka.CommitOffsets(ctx, text(2), wanted)
		if err == nil {
			err = done.Error()
		}
		return nil, err
	case "forget":
		done, err := kafka.DeleteGroups(ctx, text(2))
		if err == nil {
			err = done.Error()
		}
		return nil, err
	case "delete":
		_, err := kafka.DeleteTopic(ctx, text(2))
		return nil, err
	}
	return nil, errors.New("no method " + text(1))
}
